// Which way a rank asks for, from what calls took: single slow calls change nothing, a busy machine
// does, and slots come back once they are the faster way again.
#include "transport/agreement/preference.h"

#include <cstdio>
#include <cstdlib>

namespace {

constexpr size_t kShard = 1 << 20;
constexpr double kPull = 300e-6;

pg_sdma::Preference preference;

// Makes calls of which those through slots take so long each; returns how many were pulls.
int calls(int count, double through_slots, size_t shard = kShard) {
  int pulls = 0;
  for (int i = 0; i < count; ++i) {
    const bool pulled = preference.prefers_pull(shard);
    preference.note(shard, pulled, std::chrono::duration<double>(pulled ? kPull : through_slots));
    pulls += pulled;
  }
  return pulls;
}

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

}  // namespace

int main() {
  expect(calls(100, 100e-6) == 0, "fast slots are kept");
  calls(1, 500e-6);
  // It now knows what a pull takes.
  expect(calls(20, 100e-6) <= 1, "one slow call asks for a pull, and that is slower");
  calls(1, 500e-6);
  expect(calls(20, 100e-6) == 0, "one slow call among fast ones changes nothing");
  expect(calls(1000, 900e-6) > 900, "slow slots give way to pulls");
  expect(calls(20, 900e-6, kShard << 4) < 20, "another size is another matter");
  calls(70, 100e-6);  // until slots are tried again
  expect(calls(100, 100e-6) == 0, "slots come back when they are fast");
}
