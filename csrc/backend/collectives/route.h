// Which way a call goes: a pure function of what every rank must pass alike.
#pragma once

#include <cstdint>
#include <string>

namespace pg_sdma {

// What the static rule may look at. Never addresses, streams or the own input: those may differ
// between ranks, and then so would the route.
struct CallFacts {
  uint64_t total_bytes = 0;  // of all ranks: an all-gather's output, a reduce-scatter's input
  uint32_t tensors = 1;
  bool even = true;         // every rank's shard has one size
  bool coalescing = false;  // between startCoalescing and endCoalescing
  bool capturing = false;   // into a device graph
  std::string unsupported;  // why calls of this kind have no direct form; empty when they have one
  bool sums = false;        // with kernels on the device
};

// What the vote agreed on for a group.
struct Policy {
  std::string refusal;          // why the group has no transport; empty when it has one
  std::string no_sums;          // why it cannot sum on the device; empty when it can
  uint64_t min_bytes = 0;       // total output bytes from which a call may go direct
  uint64_t min_sum_bytes = 0;   // the same where it sums on the device
  uint64_t min_mean_bytes = 0;  // as min_bytes for the mean over the tensors of a coalesced call
};

// Why the call goes to the inner without taking a number; empty when it may go direct.
std::string static_refusal(const CallFacts& facts, const Policy& policy);

}  // namespace pg_sdma
