// How far each rank of a group has come, read off the control page, and the sentences that tell it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/health/peers.h"
#include "transport/memory/control_page.h"

namespace pg_sdma {

struct RankProgress {
  int rank = 0;
  uint64_t called = 0;    // the last numbered operation that its host has published or agreed on
  uint64_t started = 0;   // the last one whose data its queue has declared ready
  uint64_t finished = 0;  // the last one of which it has made all its copies
  uint64_t filled = 0;    // waves that it has put into its slots
  uint64_t others = 0;    // collectives that it has given to the inner
  std::string other;      // the last of these
  bool departed = false;  // it has destroyed the group
  bool ended = false;     // its process has ended
};

std::vector<RankProgress> read_progress(const ControlPage& page, const Peers& peers, int world);

// Who has not called operation `number`, who has not started it, who keeps the others waiting for
// its bytes, who has not finished copying, how long it has taken and which rank is the culprit: the
// one that is furthest behind. `stream_ordered`: whether starting an operation is an act of its
// own.
std::string tell_progress(const std::vector<RankProgress>& ranks, uint64_t number,
                          bool stream_ordered, std::chrono::duration<double> waited);

}  // namespace pg_sdma
