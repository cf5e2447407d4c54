// Votes again and again, with one rank or none that spoils it, by ranks that are threads.
//
//   stress_vote <world> <rounds> <seed>
//
// All ranks must come to the same result, with the same reason where it is no; gathers over what a
// vote gives must be right; and no descriptor and no mapping of a page may be left behind.
#include <filesystem>
#include <fstream>

#include "engine/host.h"
#include "memory_board.h"
#include "random_gathers.h"
#include "transport/setup/rendezvous.h"

namespace stress {
namespace {

using pg_sdma::Rendezvous;

enum class Spoiler { kNobody, kOff, kSettings, kNoEngine, kNoMapping, kWrongBytes, kAbsent };
constexpr int kSpoilers = 7;

// The host engine, but without a way to one peer.
class Unlinked final : public pg_sdma::Engine {
 public:
  std::string name() const override { return host_->name(); }
  bool stream_ordered() const override { return host_->stream_ordered(); }
  bool opens_exports() const override { return host_->opens_exports(); }
  pg_sdma::Place publish(const void* data, size_t bytes) override {
    return host_->publish(data, bytes);
  }
  pg_sdma::Ticket ticket(uint64_t id) override { return host_->ticket(id); }
  pg_sdma::Mapping open(const std::string& identity, const pg_sdma::Ticket& ticket) override {
    return host_->open(identity, ticket);
  }
  void close(const pg_sdma::Mapping& mapping) override { host_->close(mapping); }
  std::string identity() const override { return host_->identity(); }
  pg_sdma::Link link_to(const std::string&) const override { return pg_sdma::Link::kNone; }
  std::unique_ptr<pg_sdma::Queue> queue(void* page, size_t bytes) override {
    return host_->queue(page, bytes);
  }

 private:
  std::shared_ptr<pg_sdma::Engine> host_ = pg_sdma::host_engine();
};

struct Round {
  Setting setting;
  Spoiler spoiler = Spoiler::kNobody;
  int spoils = 0;
  std::shared_ptr<MemoryBoard> board = std::make_shared<MemoryBoard>();
  std::vector<std::string> reasons;
};

void be_rank(Round& round, int rank) {
  const bool spoils = rank == round.spoils;
  const auto is = [&](Spoiler spoiler) { return spoils && round.spoiler == spoiler; };
  Rendezvous::Options options;
  options.group = "stress";
  options.lane = "cpu";
  options.rank = rank;
  options.world = round.setting.world;
  options.ring = 2;
  options.enabled = !is(Spoiler::kOff);
  options.settings = is(Spoiler::kSettings) ? "one=2" : "one=1";
  Rendezvous rendezvous(options, round.board);
  if (is(Spoiler::kAbsent)) return;
  rendezvous.join();
  const auto engine = [&]() -> std::shared_ptr<pg_sdma::Engine> {
    if (is(Spoiler::kNoEngine)) throw pg_sdma::CannotShare("no engine on purpose");
    if (is(Spoiler::kNoMapping)) return std::make_shared<Unlinked>();
    return pg_sdma::host_engine();
  };
  // One rank finds its bytes wrong while its peers are waiting for its next gather.
  const auto self_test = [&](pg_sdma::DirectTransport& transport) -> pg_sdma::TestResult {
    Rank self(round.setting, rank, transport);
    for (int i = 0; i < 3; ++i) {
      if (is(Spoiler::kWrongBytes) && i == 1) return {"wrong bytes on purpose", {}};
      self.gather();
    }
    return {};
  };
  try {
    Rendezvous::Result result = rendezvous.vote(engine, self_test, round.setting.timeout);
    round.reasons[rank] = result.reason;
    if ((result.transport == nullptr) == result.reason.empty())
      give_up("a result without a reason");
    if (!result.transport) return;
    Rank self(round.setting, rank, *result.transport);
    for (uint64_t i = 0; i < round.setting.operations; ++i) self.gather();
  } catch (const std::runtime_error& error) {
    const std::string missing = "in vain for rank " + std::to_string(round.spoils);
    if (round.spoiler != Spoiler::kAbsent ||
        std::string(error.what()).find(missing) == std::string::npos) {
      give_up("rank %d: unexpected error: %s", rank, error.what());
    }
    round.reasons[rank] = "absent";
  }
}

void check(const Round& round) {
  const std::string& first = round.reasons[round.spoils == 0 ? 1 : 0];
  for (int rank = 0; rank < round.setting.world; ++rank) {
    if (round.spoiler == Spoiler::kAbsent && rank == round.spoils) continue;
    if (round.reasons[rank] == first) continue;
    give_up("reasons differ: '%s' and '%s'", first.c_str(), round.reasons[rank].c_str());
  }
  const char* const expected[] = {"",
                                  "PG_SDMA=off",
                                  "settings differ",
                                  "no engine on purpose",
                                  "no peer access",
                                  "wrong bytes on purpose",
                                  "absent"};
  const std::string part = expected[static_cast<int>(round.spoiler)];
  if (first.find(part) == std::string::npos || first.empty() != part.empty()) {
    give_up("unexpected reason: '%s'", first.c_str());
  }
}

// Open descriptors, and mappings of control pages.
std::pair<size_t, size_t> held() {
  size_t descriptors = 0, pages = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    descriptors += entry.is_symlink() ? 1 : 0;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:pg_sdma") != std::string::npos) ++pages;
  }
  return {descriptors, pages};
}

}  // namespace
}  // namespace stress

int main(int argc, char** argv) {
  using namespace stress;
  if (argc != 4) give_up("see the top of %s for the arguments", __FILE__);
  alarm(120);
  const int world = std::atoi(argv[1]);
  const int rounds = std::atoi(argv[2]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[3]));
  const auto before = held();
  for (int i = 0; i < rounds; ++i) {
    Round round;
    round.setting = {world, 10, seed + static_cast<unsigned>(i), {}, std::chrono::seconds(30)};
    round.spoiler = static_cast<Spoiler>(i % kSpoilers);
    round.spoils = i / kSpoilers % world;
    round.reasons.resize(static_cast<size_t>(world));
    if (round.spoiler == Spoiler::kAbsent) round.setting.timeout = std::chrono::milliseconds(50);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world; ++rank) {
      ranks.emplace_back([&round, rank] { be_rank(round, rank); });
    }
    for (std::thread& rank : ranks) rank.join();
    check(round);
    const bool all_come = round.spoiler != Spoiler::kAbsent;
    if (all_come && !round.board->keys().empty()) {
      give_up("round %d left %s on the board", i, round.board->keys()[0].c_str());
    }
    if (held() != before) {
      give_up("round %d left %zu descriptors and %zu pages", i, held().first - before.first,
              held().second - before.second);
    }
  }
  std::printf("%d votes\n", rounds);
  return 0;
}
