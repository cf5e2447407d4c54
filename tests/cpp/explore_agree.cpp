// Explores every interleaving of a small group that runs the agreement of csrc/transport/agree.h,
// and says what it found: the number of states, or a shortest way to a violation.
//
//   explore_agree <world> <operations> <ring> <opens> <faults> [<rule to leave out>]
//   explore_agree rules
//
// In every state each rank may take its next step, give up a wait, make a bad call, be refused an
// opening, or read a torn record. Every state must be free of violations (agree_model.h), no state
// may come again (a rank would go in circles), and in each a rank can go on without giving up,
// until all have finished: so no wait lasts for ever where nobody is late.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "agree_model.h"
#include "search.h"

namespace explore {

#define WITHOUT(rule)                         \
  struct Without_##rule : pg_sdma::AllRules { \
    static constexpr bool rule = false;       \
  };
#define RULES(each)                                                                               \
  each(take_verdict_found_on_entry) each(keep_direct_slot_until_consumed)                         \
      each(keep_error_slot_until_consumed) each(lap_inner_slots) each(hide_record_before_writing) \
          each(recheck_record_after_copy) each(check_every_record)                                \
              each(error_outweighs_unshareable) each(error_outweighs_lateness)                    \
                  each(acknowledge_after_opening) each(direct_needs_every_acknowledgement)        \
                      each(first_writer_wins) each(newer_number_means_late)                       \
                          each(records_before_consuming) each(patience_ends)
RULES(WITHOUT)

using Explore = bool (*)(const Bounds& bounds);
// Two ranks are enough to miss each rule.
const std::map<std::string, Explore> kWithout = {
#define ENTRY(rule) {#rule, &run_search<Group<2, Without_##rule>>},
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
  if (argc != 6 && argc != 7) {
    std::fprintf(stderr, "explore_agree <world> <operations> <ring> <opens> <faults> [<rule>]\n");
    return 2;
  }
  const int world = std::atoi(argv[1]);
  Bounds bounds;
  bounds.operations = std::atoi(argv[2]);
  bounds.ring = std::atoi(argv[3]);
  bounds.opens = std::atoi(argv[4]) != 0;
  bounds.faults = std::atoi(argv[5]);
  Explore run = nullptr;
  if (argc == 7) {
    if (world == 2 && kWithout.count(argv[6]) != 0) run = kWithout.at(argv[6]);
  } else if (world == 2 || world == 3) {
    run = world == 2 ? &run_search<Group<2, pg_sdma::AllRules>>
                     : &run_search<Group<3, pg_sdma::AllRules>>;
  }
  if (run == nullptr || bounds.operations > kMostOperations || bounds.ring > kMostSlots) {
    std::fprintf(stderr, "out of range\n");
    return 2;
  }
  return run(bounds) ? 0 : 1;
}
