// The last step of the vote: known bytes over the transport into poisoned outputs.
#pragma once

#include <c10/core/DeviceType.h>

#include <chrono>
#include <string>

#include "transport/transport.h"

namespace pg_sdma {

// Gathers shards of several sizes and alignments whose bytes every rank can compute. Returns what
// was wrong on this rank, empty when every byte was right. Throws GroupFault.
std::string self_test(Transport& transport, c10::DeviceType device, int rank, int world,
                      std::chrono::steady_clock::time_point deadline);

}  // namespace pg_sdma
