// Explores every interleaving of a small group that runs the agreement of
// csrc/transport/agreement/protocol.h, and says what it found: the number of states, or a shortest
// way to a violation.
//
//   explore_agree <world> <operations> <ring> <opens> <faults> [<rule to leave out>]
//   explore_agree rules
//
// In every state each rank may take its next step, give up a wait, make a bad call, be refused an
// opening, or read a torn record. Every state must be free of violations (agree_model.h), no state
// may come again (a rank would go in circles), and in each a rank can go on without giving up,
// until all have finished: so no wait lasts for ever where nobody is late.
#include "agree_model.h"
#include "search.h"

namespace explore {
namespace {

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

const Explorers kExplorers{
    &run_search<Group<2, pg_sdma::AllRules>>,
    &run_search<Group<3, pg_sdma::AllRules>>,
    {
#define ENTRY(rule) {#rule, &run_search<Group<2, Without_##rule>>},
        RULES(ENTRY)
#undef ENTRY
    },
    2,  // Two ranks are enough to miss each rule.
};

}  // namespace
}  // namespace explore

int main(int argc, char** argv) {
  using namespace explore;
  return explore::explore(argc, argv,
                          {&Bounds::operations, &Bounds::ring, &Bounds::opens, &Bounds::faults},
                          kExplorers);
}
