// A thread that moves off its core is on another one then, and may run where it might before.
#include "transport/health/cores.h"

#include <sched.h>

#include <cstdio>

int main() {
  using namespace pg_sdma;
  cpu_set_t before;
  cpu_set_t after;
  if (sched_getaffinity(0, sizeof before, &before) != 0) return 1;
  if (allowed_cores() != CPU_COUNT(&before)) return 1;
  for (int i = 0; i < 100; ++i) {
    const int core = this_core();
    move_off({core});
    const bool moved = this_core() != core;
    if (sched_getaffinity(0, sizeof after, &after) != 0 || !CPU_EQUAL(&before, &after)) {
      std::fprintf(stderr, "the affinity has changed\n");
      return 1;
    }
    // The kernel may move it again at once, but not each time.
    if (moved) return 0;
  }
  if (allowed_cores() == 1) return 0;
  std::fprintf(stderr, "it stays where it is\n");
  return 1;
}
