#include "transport/patience.h"

#include <algorithm>

namespace pg_sdma {

Patience::Patience(Queue& queue, Clock::time_point started, std::chrono::microseconds most)
    : queue_(queue), end_(started + most), moment_(std::min(end_, started + kMoment)) {}

Clock::time_point Patience::until(Clock::time_point now) {
  if (now < moment_ || now >= end_) return std::min(moment_, end_);
  if (!before_) before_ = queue_.mark_caller();
  return before_->passed() ? now : std::min(end_, now + kMoment);
}

}  // namespace pg_sdma
