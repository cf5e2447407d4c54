// How long a host waits for its peers within one call before they count as late, where the engine
// is stream-ordered.
#pragma once

#include <chrono>
#include <memory>

#include "engine/engine.h"
#include "transport/control_page.h"

namespace pg_sdma {

// Waiting costs nothing as long as the caller's stream holds work that has yet to run, for the
// operation could not start before it. Without such work the device idles meanwhile, and the host
// loses a lead that it would have with the inner, whose kernels wait on the device: then patience
// ends after a moment.
class Patience {
 public:
  static constexpr std::chrono::microseconds kMoment{50};

  // Of a call that started at `started`: `most` at the longest, counted from there.
  Patience(Queue& queue, Clock::time_point started, std::chrono::microseconds most);

  Clock::time_point end() const { return end_; }
  Clock::time_point moment() const { return moment_; }
  // Until when to wait before asking again; not after `now` once patience has ended.
  Clock::time_point until(Clock::time_point now);

 private:
  Queue& queue_;
  const Clock::time_point end_;
  const Clock::time_point moment_;
  std::shared_ptr<Queue::Marker> before_;  // what the device has to do first
};

}  // namespace pg_sdma
