// Two ranks, of which one is late for every gather: its peer waits for it while the caller's stream
// has something to do first, and sends the call to the inner where it has nothing.
//
//   patience <driver> <folder>
#include <thread>

#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};
constexpr std::chrono::milliseconds kLate{300};
constexpr size_t kShard = 1000;

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 3);
  const std::string driver_path = argv[1];
  const std::string folder = argv[2];
  return run_ranks(2, [&](int rank) {
    auto transport = join(driver_path, folder, rank, 2, {});
    transport->set_wait_policy(WaitPolicy::by_cost({}, kTimeout));
    const auto engine = engine_by(driver_path, rank);  // the same
    {
      Gate gate(*engine);
      Buffer output(2 * kShard);
      const Call call = gather_in_place(output.data(), kShard, rank, 2, kTimeout);
      for (const bool busy : {true, false, true, false}) {
        if (rank == 0 && busy) gate.close();
        if (rank == 1) std::this_thread::sleep_for(kLate);
        const Operation operation = transport->agree(call);
        const Decision& decision = operation.decision;
        REQUIRE(decision.direct == busy);
        REQUIRE(busy || decision.reason == "late");
        if (!busy) continue;
        transport->queue().follow_caller();
        transport->run(call, operation);
        transport->queue().caller_follows();
        if (rank == 0) gate.open();
        REQUIRE(cuStreamSynchronize(caller) == 0);
      }
    }
    transport.reset();
  });
}
