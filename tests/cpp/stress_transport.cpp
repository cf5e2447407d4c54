// Random all-gathers over the host engine, with ranks as processes or as threads of one, until a
// rank meets its fate, if it is given one.
//
//   stress_transport <processes|threads> <pull|slots> <fate> <world> <operations>
//                    <patience in us> <seed>
//
// `slots`: all-gathers go through the page's slots, here few and small.
// Fates, of one rank after half of the operations:
//   none    all run to the end
//   killed  by a signal, at any point of an operation (processes)
//   exits   without destroying the group (processes)
//   departs destroys the group early
//   aborts  from two other threads at once
//   stalls  beyond the timeout (no patience)
//   stops   by a signal, at any point of an operation, beyond the timeout (processes, no patience)
// Then every other rank must get a GroupFault that names it, again at every later call. The inner
// is left out: an operation that goes there does nothing.
//
// Prints how many operations went which way. Fails on a wrong byte, on ranks that part ways, on a
// missing or wrong fault, and after two minutes.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "engine/host.h"
#include "random_gathers.h"

namespace stress {
namespace {

using pg_sdma::ControlPage;
using pg_sdma::DirectTransport;
using pg_sdma::GroupFault;
using pg_sdma::Peers;
using pg_sdma::WaitPolicy;

enum class Fate { kNone, kKilled, kExits, kDeparts, kAborts, kStalls, kStops };

struct Run {
  Setting setting;
  Fate fate = Fate::kNone;
  int victim = 0;
  std::function<ControlPage()> page;  // a rank's own handle
  std::function<std::vector<int>(int rank)> pids;
};

constexpr int kMostRanks = 16;
constexpr uint64_t kMostOperations = 20000;

// What the ranks tell each other and the main process apart from the page under test.
struct Shared {
  std::atomic<int> pids[kMostRanks];
  std::atomic<Went> went[kMostOperations][kMostRanks];
};
Shared* shared = nullptr;

void gather(Rank& self, int rank) {
  const uint64_t index = self.operation();
  const Went went = self.gather();
  if (index < kMostOperations) shared->went[index][rank] = went;
}

// Makes the fate come true at this operation, or soon after.
void meet_fate(const Run& run, Rank& self, DirectTransport& transport,
               std::vector<std::thread>& helpers) {
  switch (run.fate) {
    case Fate::kKilled: {
      const auto delay = std::chrono::microseconds(run.setting.seed * 7919 % 3000);
      helpers.emplace_back([delay] {
        std::this_thread::sleep_for(delay);
        kill(getpid(), SIGKILL);
      });
      for (int i = 0; i < 10; ++i) gather(self, run.victim);
      kill(getpid(), SIGKILL);
      break;
    }
    case Fate::kStops:
      helpers.emplace_back([seed = run.setting.seed] {
        std::this_thread::sleep_for(std::chrono::microseconds(seed * 7919 % 3000));
        kill(getpid(), SIGSTOP);  // all threads, until a peer has raised
      });
      break;
    case Fate::kExits:
      _exit(0);
    case Fate::kAborts:
      for (int i = 0; i < 2; ++i) {
        helpers.emplace_back([&run, &transport] {
          transport.abort("rank " + std::to_string(run.victim) + " aborted on purpose");
        });
      }
      break;
    case Fate::kStalls:
      while (!transport.page().faulted()) usleep(1000);
      break;
    default:
      break;
  }
}

// Whether a fault tells what happened to whom.
void check_fault(const Run& run, int rank, const std::string& what) {
  const std::string victim = "rank " + std::to_string(run.victim);
  std::vector<std::string> stories;
  switch (run.fate) {
    case Fate::kKilled:
    case Fate::kExits:
      stories = {victim + ", whose process has ended", "memory of " + victim + " cannot be read"};
      break;
    case Fate::kDeparts:
      stories = {victim + ", which has destroyed the group"};
      break;
    case Fate::kAborts:
      stories = {victim + " aborted on purpose"};
      break;
    case Fate::kStalls:
      stories = {victim + " has not made this call"};
      break;
    case Fate::kStops:
      stories = {victim + " has not made this call", victim + " has not finished sharing",
                 victim + " has not finished copying"};
      break;
    default:
      break;
  }
  for (const std::string& story : stories) {
    if (what.find(story) != std::string::npos) return;
  }
  give_up("rank %d: unexpected fault: %s", rank, what.c_str());
}

void be_rank(const Run& run, int rank) {
  const Setting& setting = run.setting;
  DirectTransport::Options options;
  options.group = "stress";
  options.rank = rank;
  options.world = setting.world;
  options.ring = 2;
  options.keep_slots = setting.seed % 4 != 3;
  options.spin = std::chrono::microseconds(setting.seed % 2 == 0 ? 0 : 20);
  const std::vector<int> pids = run.pids(rank);
  std::vector<std::string> identities;
  for (const int pid : pids) identities.push_back(std::to_string(pid));

  std::vector<std::thread> helpers;
  {
    DirectTransport transport(options, pg_sdma::host_engine(), run.page(), identities,
                              std::make_unique<Peers>(pids));
    if (setting.patience.count() > 0) {
      transport.set_wait_policy(WaitPolicy::fixed(setting.patience));
    }
    Rank self(setting, rank, transport);
    try {
      // With patience the others can go on without a dead rank until they notice.
      while (self.operation() < setting.operations || run.fate != Fate::kNone) {
        const bool now = rank == run.victim && self.operation() == setting.operations / 2;
        if (now && run.fate == Fate::kDeparts) break;
        if (now) meet_fate(run, self, transport, helpers);
        gather(self, rank);
      }
    } catch (const GroupFault& error) {
      check_fault(run, rank, error.what());
      if (run.fate == Fate::kStops) kill(shared->pids[run.victim], SIGCONT);
      try {
        self.gather();
        give_up("rank %d: a call after the fault did not raise", rank);
      } catch (const GroupFault&) {
      }
    }
    for (std::thread& helper : helpers) helper.join();
  }
}

// Whether all ranks went the same way, as often as anything is known of them.
int count(const Run& run) {
  uint64_t counts[4] = {};
  for (uint64_t operation = 0; operation < run.setting.operations; ++operation) {
    Went way = Went::kNone;
    for (int rank = 0; rank < run.setting.world; ++rank) {
      const Went went = shared->went[operation][rank];
      if (went == Went::kNone) continue;
      if (way != Went::kNone && way != went) {
        std::fprintf(stderr, "operation %lu: ranks part ways\n", operation + 1);
        return 1;
      }
      way = went;
    }
    ++counts[static_cast<int>(way)];
  }
  std::printf("%lu direct, %lu inner, %lu error, %lu unfinished\n", counts[1], counts[2], counts[3],
              counts[0]);
  return 0;
}

int run_threads(Run& run, const ControlPage& page) {
  run.page = [&page] { return page.share(); };
  run.pids = [&run](int) { return std::vector<int>(run.setting.world, getpid()); };
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < run.setting.world; ++rank) {
    ranks.emplace_back([&run, rank] { be_rank(run, rank); });
  }
  for (std::thread& rank : ranks) rank.join();
  return count(run);
}

int run_processes(Run& run, const ControlPage& page) {
  const int parent = getpid();
  run.page = [&] {
    return ControlPage::attach(parent, page.descriptor(), page.nonce(), run.setting.world, 2);
  };
  run.pids = [&run](int rank) {
    shared->pids[rank] = getpid();
    std::vector<int> pids;
    for (int peer = 0; peer < run.setting.world; ++peer) {
      while (shared->pids[peer] == 0) usleep(100);
      pids.push_back(shared->pids[peer]);
    }
    return pids;
  };
  std::vector<pid_t> children;
  for (int rank = 0; rank < run.setting.world; ++rank) {
    const pid_t child = fork();
    if (child < 0) give_up("fork: %s", std::strerror(errno));
    if (child == 0) {
      alarm(120);
      pg_sdma::let_peers_read();
      be_rank(run, rank);
      std::exit(0);
    }
    children.push_back(child);
  }
  int failures = 0;
  for (int rank = 0; rank < run.setting.world; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL &&
                        run.fate == Fate::kKilled && rank == run.victim;
    if (killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    std::fprintf(stderr, "rank %d ended with status %x\n", rank, status);
    ++failures;
  }
  return failures != 0 ? 1 : count(run);
}

}  // namespace
}  // namespace stress

int main(int argc, char** argv) {
  using namespace stress;
  if (argc != 8) give_up("see the top of %s for the arguments", __FILE__);
  alarm(125);
  const bool threads = std::string(argv[1]) == "threads";
  const std::vector<std::string> fates{"none",   "killed", "exits", "departs",
                                       "aborts", "stalls", "stops"};
  Run run;
  run.fate = static_cast<Fate>(std::find(fates.begin(), fates.end(), argv[3]) - fates.begin());
  run.setting.world = std::atoi(argv[4]);
  run.setting.operations = static_cast<uint64_t>(std::atol(argv[5]));
  run.setting.patience = std::chrono::microseconds(std::atol(argv[6]));
  run.setting.seed = static_cast<unsigned>(std::atoi(argv[7]));
  run.victim = static_cast<int>(run.setting.seed) % run.setting.world;
  if (run.fate == Fate::kStalls || run.fate == Fate::kStops)
    run.setting.timeout = std::chrono::milliseconds(2000);
  if (run.setting.world > kMostRanks || run.setting.operations > kMostOperations) {
    give_up("at most %d ranks and %lu operations", kMostRanks, kMostOperations);
  }
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) give_up("mmap: %s", std::strerror(errno));
  shared = new (memory) Shared{};
  pg_sdma::SlotShape slots;
  if (std::string(argv[2]) == "slots") {
    slots = {run.setting.seed % 2 == 0 ? uint64_t{2} : 8, 4096};
  }
  const ControlPage page = ControlPage::create(run.setting.world, 2, slots);
  return threads ? run_threads(run, page) : run_processes(run, page);
}
