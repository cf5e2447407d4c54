// One operation at a time, over all groups of this process.
#pragma once

#include <mutex>

#include "engine/engine.h"

namespace pg_sdma {

// Held from an operation's agreement until it is enqueued, where the engine's streams may share
// hardware queues. For every direct operation there is then a moment when each of its ranks holds
// its own, so any two operations that share ranks are enqueued there in the same order, and neither
// waits behind the other's wait. Holds nothing of other engines.
inline std::unique_lock<std::mutex> enqueue_alone(bool shares_hardware_queues) {
  static auto* mutex = new std::mutex;  // threads may still call while the process ends
  if (!shares_hardware_queues) return {};
  return std::unique_lock<std::mutex>(*mutex);
}

}  // namespace pg_sdma
