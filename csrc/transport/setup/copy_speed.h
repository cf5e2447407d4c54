// What this group's devices do when they copy.
#pragma once

#include "transport/agreement/wait_policy.h"
#include "transport/direct_transport.h"

namespace pg_sdma {

// What copies to the next rank take, alone and with one from there beside: on some GPUs all copies
// to and from memory of other processes go through one engine. After an all-gather, `operation`,
// that has ended on all ranks, whose memory is still there, and while nobody else copies. Throws
// std::runtime_error when copies do not end within the operation's timeout.
CopySpeed measure_copies(DirectTransport& transport, const Operation& operation);

}  // namespace pg_sdma
