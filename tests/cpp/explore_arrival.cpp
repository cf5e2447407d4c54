// Explores every interleaving of a small group that carries operations in order of arrival, by
// csrc/transport/agreement/late_protocol.h, and says what it found, as explore_agree.cpp does.
//
//   explore_arrival <world> <operations> <ring> <faults> [<rule to leave out>]
//   explore_arrival rules
#include "arrival_model.h"
#include "search.h"

namespace explore {
namespace {

#define WITHOUT(rule)                                \
  struct Without_##rule : pg_sdma::AllArrivalRules { \
    static constexpr bool rule = false;              \
  };
#define RULES(each)                                                                         \
  each(keep_slot_until_caught_up) each(write_record_before_joining) each(lapped_ranks_look) \
      each(unreachable_ranks_come_last) each(invalid_calls_do_not_join)
RULES(WITHOUT)

const Explorers kExplorers{
    &run_search<ArrivalGroup<2, pg_sdma::AllArrivalRules>>,
    &run_search<ArrivalGroup<3, pg_sdma::AllArrivalRules>>,
    {
#define ENTRY(rule) {#rule, &run_search<ArrivalGroup<3, Without_##rule>>},
        RULES(ENTRY)
#undef ENTRY
    },
    3,  // An unreachable rank is missed by those behind it: three are enough.
};

}  // namespace
}  // namespace explore

int main(int argc, char** argv) {
  using namespace explore;
  return explore::explore(argc, argv, {&Bounds::operations, &Bounds::ring, &Bounds::faults},
                          kExplorers);
}
