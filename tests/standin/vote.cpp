// A group's vote with its self-test, where the driver of one rank, or of all, is broken.
//
//   vote <driver> <folder> <ranks> <victim> <patience in ms> <timeout in ms> [NAME=value...]
//
// <folder> is empty and the group's own. <victim>: the rank that has NAME=value in its environment,
// -1 for all. <patience>: of the self-test, for one gather. <timeout>: of the vote. Prints "rank
// <r>: direct" or "rank <r>: inner: <reason>"; afterwards every rank frees its memory and ends by
// itself.
#include "test_memory.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

std::string outcome(const std::string& driver, const std::string& folder, int rank, int world,
                    std::chrono::milliseconds patience, std::chrono::milliseconds timeout) {
  Rendezvous::Options options;
  options.group = "vote";
  options.lane = "cuda";
  options.rank = rank;
  options.world = world;
  options.defer = true;
  Rendezvous rendezvous(options, std::make_shared<FileBoard>(folder));
  rendezvous.join();
  std::shared_ptr<Engine> engine;
  const auto make_engine = [&] {
    engine = engine_by(driver, rank);
    enter(rank);
    return engine;
  };
  const auto deadline = Clock::now() + timeout;
  BufferMemory memory;
  const auto test = [&](DirectTransport& transport) {
    SelfTest self;
    self.rank = rank;
    self.world = world;
    self.stream_ordered = engine->stream_ordered();
    self.doubts = engine->doubts();
    self.deadline = deadline;
    self.patience = patience;
    return self_test(transport, memory, self);
  };
  const Rendezvous::Result result = rendezvous.vote(make_engine, test, timeout);
  if (!result.transport) return "inner: " + result.reason;
  const CopySpeed speed = result.transport->wait_policy().speed();
  return "direct, copies at " + std::to_string(speed.bytes_per_second) + " bytes/s, " +
         (speed.both_ways_at_once ? "both ways at once" : "one way at a time");
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc >= 7);
  const int world = std::atoi(argv[3]);
  const int victim = std::atoi(argv[4]);
  return run_ranks(world, [&](int rank) {
    if (victim < 0 || rank == victim) {
      for (int i = 7; i < argc; ++i) REQUIRE(putenv(argv[i]) == 0);
    }
    const std::chrono::milliseconds patience(std::atoi(argv[5]));
    const std::chrono::milliseconds timeout(std::atoi(argv[6]));
    const std::string how = outcome(argv[1], argv[2], rank, world, patience, timeout);
    std::printf("rank %d: %s\n", rank, how.c_str());
    std::fflush(stdout);
  });
}
