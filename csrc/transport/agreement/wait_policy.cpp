#include "transport/agreement/wait_policy.h"

#include <algorithm>

namespace pg_sdma {

WaitPolicy WaitPolicy::fixed(Duration wait) {
  WaitPolicy policy;
  policy.kind_ = Kind::kFixed;
  policy.longest_ = wait;
  return policy;
}

WaitPolicy WaitPolicy::by_cost(const CopySpeed& speed, Duration busy_wait) {
  WaitPolicy policy;
  policy.kind_ = Kind::kByCost;
  policy.longest_ = busy_wait;
  policy.speed_ = speed;
  return policy;
}

void WaitPolicy::begin(Clock::time_point now, uint64_t second_copy, uint64_t behind) {
  began_ = now;
  dry_ = false;
  second_copy_ = Duration(0);
  if (speed_.bytes_per_second > 0 && !speed_.both_ways_at_once) {
    const std::chrono::duration<double> takes(static_cast<double>(second_copy) /
                                              speed_.bytes_per_second);
    second_copy_ = std::chrono::duration_cast<Duration>(takes);
  }
  at_once_ = behind > 0 && asks_who_is_behind();
}

Clock::time_point WaitPolicy::until(Clock::time_point now, const std::function<bool()>& busy) {
  if (kind_ == Kind::kFixed) {
    return at_once_ ? std::min(began_ + kIdleWait, end()) : end();
  }
  if (at_once_) return began_;
  const Clock::time_point idle_end = began_ + std::min<Duration>(kIdleWait, longest_);
  if (now < idle_end) return idle_end;
  if (!dry_) {
    if (now >= end()) return now;
    if (busy()) return std::min(end(), now + kIdleWait);
    dry_ = true;
    dry_until_ = std::max(idle_end, now + second_copy_);
  }
  return dry_until_;
}

}  // namespace pg_sdma
