// The host engine: CPU tensors. A peer's memory is its address space, read by process_vm_readv; a
// program runs on the calling thread.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace pg_sdma {

std::shared_ptr<Engine> host_engine();

// Lets any process of this user read this one's memory where Yama would allow only its parent
// (prctl(2), PR_SET_PTRACER). Without Yama nothing needs it and it does nothing.
void let_peers_read();

}  // namespace pg_sdma
