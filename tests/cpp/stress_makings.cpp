// Makes a group again and again on one board, by ranks that are threads and wait for each other in
// nothing but the group's own calls.
//
//   stress_makings <world> <groups> <seed>
//
// Of some groups no rank votes; of some a rank gives up at once, and all others have to be told.
// Every other group has to go direct, over a transport of its own, and leave nothing on the board.
#include <barrier>

#include "engine/host.h"
#include "memory_board.h"
#include "random_gathers.h"
#include "transport/setup/rendezvous.h"

namespace stress {
namespace {

using pg_sdma::Rendezvous;

enum class Use { kGathers, kNothing, kGivenUp };

struct Job {
  int world;
  int groups;
  unsigned seed;
  MemoryBoard board;
  std::barrier<> made;

  // Drawn alike by all ranks.
  unsigned draw(int group, unsigned below) const {
    std::minstd_rand random(seed * 7919 + static_cast<unsigned>(group) * 104729 + 1);
    random.discard(3);
    return static_cast<unsigned>(random()) % below;
  }
  Use use(int group) const {
    if (group == groups - 1) return Use::kGathers;
    const unsigned drawn = draw(group, 8);
    return drawn == 0 ? Use::kGivenUp : drawn < 3 ? Use::kNothing : Use::kGathers;
  }
};

void be_rank(Job& job, int rank) {
  std::minstd_rand own(job.seed * 31 + static_cast<unsigned>(rank) + 17);
  const auto dawdle = [&] {
    if (own() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
  };
  for (int group = 0; group < job.groups; ++group) {
    Rendezvous::Options options;
    options.group = "group" + std::to_string(group);
    options.lane = "cpu";
    options.rank = rank;
    options.world = job.world;
    options.ring = 2;
    options.slots = false;
    dawdle();
    Rendezvous rendezvous(options, std::shared_ptr<pg_sdma::Board>(&job.board, [](auto*) {}));
    rendezvous.join();
    dawdle();
    const Use use = job.use(group);
    if (use == Use::kNothing) continue;
    const bool gives_up =
        use == Use::kGivenUp && rank == static_cast<int>(job.draw(group, 97)) % job.world;
    if (use == Use::kGivenUp) {
      job.made.arrive_and_wait();
      if (!gives_up) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    const auto self_test = [](pg_sdma::DirectTransport&) { return pg_sdma::TestResult(); };
    try {
      const std::chrono::milliseconds timeout(gives_up ? 1 : 60000);
      Rendezvous::Result result = rendezvous.vote(pg_sdma::host_engine, self_test, timeout);
      if (use == Use::kGivenUp) give_up("rank %d: group %d came about", rank, group);
      if (!result.transport) give_up("rank %d: %s", rank, result.reason.c_str());
      const unsigned seed = job.seed + static_cast<unsigned>(group);
      const Setting setting{job.world, 3, seed, {}, std::chrono::minutes(1)};
      Rank self(setting, rank, *result.transport);
      for (int i = 0; i < 3; ++i) self.gather();
    } catch (const std::runtime_error& error) {
      if (use != Use::kGivenUp) give_up("rank %d: group %d: %s", rank, group, error.what());
      if (std::string(error.what()).find("group" + std::to_string(group) + " ") ==
          std::string::npos) {
        give_up("rank %d: an error of another group: %s", rank, error.what());
      }
    }
    // One that has given up makes the next group before the others vote in this one.
  }
}

}  // namespace
}  // namespace stress

int main(int argc, char** argv) {
  using namespace stress;
  if (argc != 4) give_up("see the top of %s for the arguments", __FILE__);
  alarm(120);
  const int world = std::atoi(argv[1]);
  Job job{world,
          std::atoi(argv[2]),
          static_cast<unsigned>(std::atoi(argv[3])),
          {},
          std::barrier<>(world)};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&job, rank] { be_rank(job, rank); });
  }
  for (std::thread& rank : ranks) rank.join();
  // What failed leaves word of it, and what nobody voted in nothing once the next vote is over.
  int failed = 0;
  for (int group = 0; group < job.groups; ++group) failed += job.use(group) == Use::kGivenUp;
  const size_t left = job.board.keys().size();
  std::printf("%d groups, %d failed, %zu keys left\n", job.groups, failed, left);
  if (left > static_cast<size_t>(4 * world * failed)) give_up("too many: %zu", left);
  return 0;
}
