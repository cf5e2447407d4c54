// Explores every interleaving of a small group that carries operations in order of arrival, by
// csrc/transport/arrival.h, and says what it found, as explore_agree.cpp does.
//
//   explore_arrival <world> <operations> <ring> <faults> [<rule to leave out>]
//   explore_arrival rules
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "arrival_model.h"
#include "search.h"

namespace explore {

#define WITHOUT(rule)                                \
  struct Without_##rule : pg_sdma::AllArrivalRules { \
    static constexpr bool rule = false;              \
  };
#define RULES(each)                                                                         \
  each(keep_slot_until_caught_up) each(write_record_before_joining) each(lapped_ranks_look) \
      each(unreachable_ranks_come_last) each(invalid_calls_do_not_join)
RULES(WITHOUT)

using Explore = bool (*)(const Bounds& bounds);
// An unreachable rank is missed by those behind it: three are enough.
const std::map<std::string, Explore> kWithout = {
#define ENTRY(rule) {#rule, &run_search<ArrivalGroup<3, Without_##rule>>},
    RULES(ENTRY)
#undef ENTRY
};

}  // namespace explore

int main(int argc, char** argv) {
  using namespace explore;
  if (argc == 2 && std::strcmp(argv[1], "rules") == 0) {
    for (const auto& [rule, run] : kWithout) std::puts(rule.c_str());
    return 0;
  }
  if (argc != 5 && argc != 6) {
    std::fprintf(stderr, "explore_arrival <world> <operations> <ring> <faults> [<rule>]\n");
    return 2;
  }
  const int world = std::atoi(argv[1]);
  Bounds bounds;
  bounds.operations = std::atoi(argv[2]);
  bounds.ring = std::atoi(argv[3]);
  bounds.faults = std::atoi(argv[4]);
  Explore run = nullptr;
  if (argc == 6) {
    if (world == 3 && kWithout.count(argv[5]) != 0) run = kWithout.at(argv[5]);
  } else if (world == 2 || world == 3) {
    run = world == 2 ? &run_search<ArrivalGroup<2, pg_sdma::AllArrivalRules>>
                     : &run_search<ArrivalGroup<3, pg_sdma::AllArrivalRules>>;
  }
  if (run == nullptr || bounds.operations > kMostOperations || bounds.ring > kMostSlots) {
    std::fprintf(stderr, "out of range\n");
    return 2;
  }
  return run(bounds) ? 0 : 1;
}
