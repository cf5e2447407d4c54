// Two groups of the same ranks, each gathered by a thread of its own, at moments of their own,
// where all streams of a rank share one hardware queue: a wait of one group holds up the other's.
//
//   two_groups [hip:]<driver> <folder> <ranks> <gathers> <seed>
//
// <folder> is empty and the groups' own. Prints how many gathers went direct; those of a late rank
// do not. Hangs, and then fails, if two operations were enqueued in different orders on two ranks.
#include <algorithm>
#include <atomic>
#include <random>

#include "group.h"
#include "transport/enqueuing.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr size_t kShard = 1000;
constexpr std::chrono::milliseconds kTimeout{60000};
constexpr std::chrono::milliseconds kPatience{20};

thread_local Stream mine = nullptr;

unsigned char value(int group, int rank, int gather) {
  return static_cast<unsigned char>(91 * group + 41 * rank + gather);
}

struct Run {
  std::string driver, folder;
  int world = 0;
  int gathers = 0;
  unsigned seed = 0;
};

std::unique_ptr<DirectTransport> join_group(const Run& run, int group, int rank, bool& shares) {
  Rendezvous::Options options;
  options.group = "group" + std::to_string(group);
  options.lane = options.group;
  options.rank = rank;
  options.world = run.world;
  options.patience = kPatience;
  Rendezvous rendezvous(options, std::make_shared<FileBoard>(run.folder));
  rendezvous.join();
  const auto engine = [&] {
    auto made =
        device_engine(by_hip(run.driver) ? driver::Vendor::kHip : driver::Vendor::kCuda, rank,
                      by_hip(run.driver) ? run.driver.substr(4) : run.driver, [] { return mine; });
    shares = made->shares_hardware_queues();
    standin_share_queues(1);
    return made;
  };
  const auto no_test = [](DirectTransport&) { return TestResult(); };
  auto result = rendezvous.vote(engine, no_test, kTimeout);
  if (!result.transport) throw std::runtime_error("the vote says: " + result.reason);
  return std::move(result.transport);
}

// Returns how many went direct.
int gather(const Run& run, int group, int rank, DirectTransport& transport, bool shares) {
  driver::Context context = nullptr;
  REQUIRE(driver::cuDevicePrimaryCtxRetain(&context, rank) == 0);
  REQUIRE(driver::cuCtxPushCurrent_v2(context) == 0);
  REQUIRE(driver::cuStreamCreateWithPriority(&mine, driver::kNonBlocking, 0) == 0);
  std::minstd_rand random(run.seed * 31 + static_cast<unsigned>(2 * rank + group));
  Buffer input(kShard);
  Buffer output(kShard * static_cast<size_t>(run.world));
  int direct = 0;
  bool late = false;
  for (int i = 0; i < run.gathers || direct == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    std::fill_n(input.data(), kShard, value(group, rank, i));
    Call call;
    call.operation = "two_groups";
    call.dtype = "uint8";
    call.timeout = kTimeout;
    Piece piece{input.data(), kShard, {}};
    for (int r = 0; r < run.world; ++r) piece.outputs.push_back(output.data() + r * kShard);
    call.pieces.push_back(std::move(piece));
    if (late) std::this_thread::sleep_for(kPatience);  // or the ranks may never be level again
    {
      const auto alone = enqueue_alone(shares);
      const Operation operation = transport.agree(call);
      late = !operation.decision.direct;
      if (late) continue;
      // Long enough for the other thread to come first, if it may.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      if (random() % 2 == 0) {
        transport.queue().follow_caller();
      } else {
        transport.queue().use_callers_stream();
      }
      transport.run(call, operation);
      transport.queue().caller_follows();
    }
    ++direct;
    REQUIRE(cuStreamSynchronize(mine) == 0);
    for (int r = 0; r < run.world; ++r) {
      const unsigned char* shard = output.data() + r * kShard;
      REQUIRE(std::all_of(shard, shard + kShard,
                          [&](unsigned char byte) { return byte == value(group, r, i); }));
    }
  }
  return direct;
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 6);
  const Run run{argv[1], argv[2], std::atoi(argv[3]), std::atoi(argv[4]),
                static_cast<unsigned>(std::atoi(argv[5]))};
  return run_ranks(run.world, [&](int rank) {
    bool shares = false;
    std::unique_ptr<DirectTransport> transports[2];
    for (int group = 0; group < 2; ++group) {
      transports[group] = join_group(run, group, rank, shares);
    }
    std::atomic<int> direct{0};
    std::vector<std::thread> threads;
    for (int group = 0; group < 2; ++group) {
      threads.emplace_back(
          [&, group] { direct += gather(run, group, rank, *transports[group], shares); });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("rank %d: %d direct\n", rank, direct.load());
    std::fflush(stdout);
  });
}
