// Ranks that are lost in the middle of all-gathers on the stand-in, by whose hand the parent likes.
//
//   faults <driver> <folder> <ranks> <fate> <timeout in ms> <seed> [late]
//
// <folder> is empty and the group's own. Fates, of one rank:
//   killed   by SIGKILL at a random moment, from the vote on
//   stopped  by SIGSTOP, likewise, and killed once the others have ended
//   departs  destroys the group while the others go on
//   ignored  as none, and the others' hosts do not wait for their gathers, so that the next call
//            tells them and they leave the group
//   none     nothing but what PG_SDMA_INJECT says, which goes for the victim alone
// With `late` ranks come late now and then, and gathers go in order of arrival.
// The others must end within the timeout and two seconds: a rank whose streams wait by SIGABRT,
// from the watchdog; one whose host waits by an exception. Either way with a message, which is
// printed. Prints "<n> aborted, <n> raised" and fails where a rank ended in another way, or
// gathered wrongly.
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <random>

#include "engine/inject.h"
#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr int kRaised = 3;  // exit status of a rank whose host was told
constexpr size_t kShard = size_t{1} << 14;
constexpr int kBatch = 4;

struct Run {
  std::string driver, folder, fate;
  int world = 0;
  int victim = 0;
  std::chrono::milliseconds timeout{0};
  bool late = false;
};

class Rank {
 public:
  Rank(int rank, const Run& run)
      : rank_(rank),
        world_(run.world),
        timeout_(run.timeout),
        late_(run.late),
        random_(static_cast<unsigned>(rank) + 1),
        input_(kShard),
        output_(kShard * run.world) {}

  // Enqueues gathers and looks at none.
  void enqueue(DirectTransport& transport) {
    for (;;) {
      const Call call = gather();
      const Operation operation = transport.agree(call);
      if (!operation.decision.direct) continue;
      transport.queue().follow_caller();
      transport.run(call, operation);
    }
  }

  // Gathers kBatch times, then looks at what came last.
  void batch(DirectTransport& transport) {
    for (int i = 0; i < kBatch; ++i) {
      REQUIRE(cuStreamSynchronize(caller) == 0);
      std::fill_n(input_.data(), kShard, value(rank_, ++operation_));
      const Call call = gather();
      if (late_ && random_() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 1000));
      }
      const Operation operation = transport.agree(call);
      if (!operation.decision.direct) continue;  // a rank was late
      transport.queue().follow_caller();
      transport.run(call, operation);
      transport.queue().caller_follows();
      REQUIRE(cuStreamSynchronize(caller) == 0);
      for (int rank = 0; rank < world_; ++rank) {
        for (size_t at = 0; at < kShard; ++at) {
          REQUIRE(output_.data()[rank * kShard + at] == value(rank, operation_));
        }
      }
    }
  }

 private:
  Call gather() {
    Call call;
    call.operation = "faults";
    call.dtype = "uint8";
    call.timeout = timeout_;
    Piece piece{input_.data(), kShard, {}};
    for (int rank = 0; rank < world_; ++rank) {
      piece.outputs.push_back(output_.data() + rank * kShard);
    }
    call.pieces.push_back(std::move(piece));
    return call;
  }

  static unsigned char value(int rank, uint64_t operation) {
    return static_cast<unsigned char>(41 * rank + operation);
  }

  int rank_;
  int world_;
  std::chrono::milliseconds timeout_;
  bool late_;
  std::minstd_rand random_;
  Buffer input_;
  Buffer output_;
  uint64_t operation_ = 0;
};

void be_rank(const Run& run, int rank) {
  if (rank == run.victim) {
    if (const char* plan = std::getenv("PG_SDMA_INJECT")) inject::configure(plan);
  }
  Rendezvous::Options options;
  options.group = "faults";
  options.lane = "cuda";
  options.rank = rank;
  options.world = run.world;
  if (!run.late) options.patience = std::chrono::seconds(60);
  options.defer = run.late;
  options.on_fault = [rank](const std::string& why) {
    std::fprintf(stderr, "rank %d is told: %s\n", rank, why.c_str());
  };
  Rendezvous rendezvous(options, std::make_shared<FileBoard>(run.folder));
  rendezvous.join();
  std::unique_ptr<Rank> self;
  const auto engine = [&] {
    auto made = engine_by(run.driver, rank);
    enter(rank);
    self = std::make_unique<Rank>(rank, run);
    return made;
  };
  const auto test = [&](DirectTransport& transport) {
    self->batch(transport);
    return TestResult();
  };
  Rendezvous::Result result = rendezvous.vote(engine, test, run.timeout);
  if (!result.transport) throw std::runtime_error("no transport: " + result.reason);
  for (int i = 0;; ++i) {
    if (run.fate == "departs" && rank == run.victim && i == 20) {
      result.transport.reset();
      std::this_thread::sleep_for(run.timeout);
      std::_Exit(0);
    }
    if (run.fate == "ignored") self->enqueue(*result.transport);
    self->batch(*result.transport);
  }
}

pid_t start(const Run& run, int rank) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child > 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    be_rank(run, rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    std::_Exit(kRaised);
  }
  std::_Exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 7 || argc == 8);
  alarm(120);
  Run run;
  run.driver = argv[1];
  run.folder = argv[2];
  run.world = std::atoi(argv[3]);
  run.fate = argv[4];
  run.timeout = std::chrono::milliseconds(std::atoi(argv[5]));
  run.late = argc == 8;
  std::minstd_rand random(static_cast<unsigned>(std::atoi(argv[6])));
  random.discard(10);
  run.victim = static_cast<int>(random() % run.world);

  std::vector<pid_t> ranks;
  for (int rank = 0; rank < run.world; ++rank) ranks.push_back(start(run, rank));
  std::this_thread::sleep_for(std::chrono::milliseconds(20 + random() % 400));
  const pid_t victim = ranks[run.victim];
  if (run.fate == "killed") kill(victim, SIGKILL);
  if (run.fate == "stopped") kill(victim, SIGSTOP);
  const auto deadline =
      std::chrono::steady_clock::now() + run.timeout + std::chrono::milliseconds(2000);

  int aborted = 0, raised = 0, failed = 0;
  for (int rank = 0; rank < run.world; ++rank) {
    if (rank == run.victim) continue;
    int status = 0;
    pid_t ended = 0;
    while ((ended = waitpid(ranks[rank], &status, WNOHANG)) == 0 &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (ended == 0) {
      std::fprintf(stderr, "rank %d hangs\n", rank);
      kill(ranks[rank], SIGKILL);
      waitpid(ranks[rank], &status, 0);
      ++failed;
    } else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) {
      ++aborted;
    } else if (WIFEXITED(status) && WEXITSTATUS(status) == kRaised) {
      ++raised;
    } else {
      std::fprintf(stderr, "rank %d ended with status %x\n", rank, status);
      ++failed;
    }
  }
  kill(victim, SIGKILL);
  waitpid(victim, nullptr, 0);
  std::printf("%d aborted, %d raised\n", aborted, raised);
  return failed == 0 ? 0 : 1;
}
