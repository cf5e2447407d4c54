// How long a host waits for late peers, on a clock that this test moves.
#include "transport/agreement/wait_policy.h"

#include <cstdio>
#include <cstdlib>

namespace {

using namespace std::chrono_literals;
using pg_sdma::Clock;
using pg_sdma::CopySpeed;
using pg_sdma::WaitPolicy;

constexpr uint64_t kBytes = 100'000'000;
constexpr CopySpeed kOneEngine{100e9, false};  // kBytes take 1 ms
constexpr CopySpeed kTwoEngines{100e9, true};
constexpr Clock::duration kForEver = 1h;

Clock::time_point now;

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

// How long a host waits for a peer that never comes, whose stream holds work for `busy`. It looks
// as often as the policy says.
Clock::duration wait_in_vain(WaitPolicy& policy, Clock::duration busy, uint64_t behind = 0,
                             uint64_t bytes = kBytes) {
  const auto began = now;
  policy.begin(began, bytes, behind);
  for (;;) {
    const auto until = policy.until(now, [&] { return now < began + busy; });
    if (until <= now) break;
    now = until;
  }
  policy.waited_in_vain();
  return now - began;
}

bool about(Clock::duration found, Clock::duration right) {
  return found >= right && found <= right + WaitPolicy::kIdleWait;
}

void what_waiting_costs() {
  WaitPolicy policy = WaitPolicy::by_cost(kOneEngine);
  expect(policy.ends(), "a wait by its cost ends");
  expect(about(wait_in_vain(policy, 0us), 1ms), "an idle device waits as long as the second copy");
  expect(about(wait_in_vain(policy, 2ms), 3ms), "and so does one that runs dry meanwhile");
  expect(wait_in_vain(policy, kForEver) == 5ms, "a busy one holds its host up for 5 ms at most");
  expect(about(wait_in_vain(policy, 4900us), 5900us),
         "one that runs dry just before that waits on");
  expect(about(wait_in_vain(policy, 0us, 0, 1000), 50us),
         "a small copy is worth the shortest wait");
  expect(about(wait_in_vain(policy, 2ms, 0, 0), 2ms), "where nothing is copied twice, none more");

  WaitPolicy two_engines = WaitPolicy::by_cost(kTwoEngines);
  expect(wait_in_vain(two_engines, 0us) == 50us, "a second copy at the same time costs nothing");
  expect(about(wait_in_vain(two_engines, 2ms), 2ms), "but waiting while busy is free there too");

  WaitPolicy not_measured = WaitPolicy::by_cost({});
  expect(wait_in_vain(not_measured, 0us) == 50us, "what was not measured is not waited for");
}

void who_is_steadily_behind() {
  WaitPolicy policy = WaitPolicy::by_cost(kOneEngine);
  for (int i = 0; i < WaitPolicy::kSteadily; ++i) {
    expect(wait_in_vain(policy, kForEver, 40) > 0us, "it is waited for some times");
  }
  expect(wait_in_vain(policy, kForEver, 40) == 0us, "and then not any more");
  expect(wait_in_vain(policy, 0us, 1) == 0us, "while it is behind");
  expect(wait_in_vain(policy, 0us, 0) > 0us, "one that has caught up is waited for");
  expect(wait_in_vain(policy, 0us, 3) == 0us, "but it has to come, too");
  policy.begin(now, kBytes, 0);
  policy.met();
  expect(wait_in_vain(policy, 0us, 3) > 0us, "one that came is waited for the next time");
}

void what_a_user_sets() {
  WaitPolicy policy = WaitPolicy::fixed(20ms);
  expect(wait_in_vain(policy, 0us) == 20ms, "a user's wait is as long as that");
  expect(wait_in_vain(policy, 0us, 0) == 20ms, "at every call");
  expect(wait_in_vain(policy, 0us, 2) == 50us, "but not while a peer that was late is behind");
  policy.met();
  expect(wait_in_vain(policy, 0us, 2) == 20ms, "until it came");
  WaitPolicy brief = WaitPolicy::fixed(10us);
  wait_in_vain(brief, 0us);
  expect(wait_in_vain(brief, 0us, 2) == 10us, "a user's short wait is never lengthened");
}

}  // namespace

int main() {
  expect(!WaitPolicy().ends(), "without a policy the call's timeout ends a wait");
  what_waiting_costs();
  who_is_steadily_behind();
  what_a_user_sets();
}
