#include "transport/health/cores.h"

#include <sched.h>

#include <thread>

namespace pg_sdma {

int this_core() { return sched_getcpu(); }

int allowed_cores() {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof allowed, &allowed) == 0
             ? CPU_COUNT(&allowed)
             : static_cast<int>(std::thread::hardware_concurrency());
}

void move_off(const std::vector<int>& taken) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  for (const int core : taken) CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0) return;
  // The first moves it at once. The second lets it go on where it then is.
  sched_setaffinity(0, sizeof others, &others);
  sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace pg_sdma
