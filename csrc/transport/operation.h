// One operation of a group: what agreeing on a call returns. It says all that carrying it out
// needs, and is never changed afterwards.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/clock.h"
#include "transport/schedule/exchange.h"

namespace pg_sdma {

// Which way an operation goes, the same on all ranks.
struct Decision {
  bool direct = false;
  std::string reason;  // when not direct
  std::string here;    // more of it, where it lies with this rank
};

// A peer's exposed region as this process reaches it.
struct RemoteRegion {
  uint64_t space = 0;  // as in Mapping
  uintptr_t address = 0;
};

struct Operation {
  uint64_t number = 0;  // of the group's operations, from 1
  Decision decision;

  // -- for messages, and for how long to wait
  std::string name;
  uint64_t bytes = 0;  // of the whole call
  bool reduces = false;
  bool trial = false;  // as in Call
  Clock::time_point started{};
  std::chrono::milliseconds timeout{0};
  Clock::time_point deadline() const { return started + timeout; }

  // -- when direct
  Exchange exchange;
  std::vector<RemoteRegion> regions;  // exchange.exposed.size() a rank; not of the own rank
  bool staged = false;                // through staging buffers
  // Where it goes in order of arrival: the ranks before this one.
  std::optional<std::vector<int>> earlier;

  bool in_order_of_arrival() const { return earlier.has_value(); }
  const RemoteRegion& region(int rank, size_t index) const {
    return regions[static_cast<size_t>(rank) * exchange.exposed.size() + index];
  }
};

}  // namespace pg_sdma
