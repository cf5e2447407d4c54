#include "transport/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "engine/host.h"

namespace pg_sdma {
namespace {

constexpr const char* kProtocol = "1";

// A GPU's host runs ahead of its device: it must not be held up by a peer that is late, when the
// inner would enqueue and go on.
constexpr std::chrono::milliseconds kStreamPatience{5};

// A record: one `name=value` a line. Values hold no line breaks.
using Fields = std::map<std::string, std::string>;

std::string write_fields(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += name + "=" + value + "\n";
  return text;
}

Fields read_fields(const std::string& text) {
  Fields fields;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find('=');
    if (at != std::string::npos) fields[line.substr(0, at)] = line.substr(at + 1);
  }
  return fields;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  char target[256];
  const ssize_t length = readlink(path, target, sizeof target);
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : "";
}

// Ranks that share this can name each other's processes and read their descriptors.
std::string host_identity() {
  return first_line("/proc/sys/kernel/random/boot_id") + " " + link_target("/proc/self/ns/pid") +
         " uid:" + std::to_string(geteuid());
}

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

// Why the records of a group rule a transport out; nothing when they do not.
std::optional<std::string> objection(const std::vector<std::string>& records) {
  const Fields first = read_fields(records[0]);
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const Fields mine = read_fields(records[rank]);
    const std::string who = "rank " + std::to_string(rank);
    if (mine.at("protocol") != first.at("protocol")) {
      return who + " runs another version of pg_sdma than rank 0";
    }
    if (mine.at("enabled") != "1") return "PG_SDMA=off on " + who;
    if (mine.at("settings") != first.at("settings")) {
      return "settings differ: rank 0 has " + first.at("settings") + ", " + who + " has " +
             mine.at("settings");
    }
    if (mine.at("host") != first.at("host")) {
      return who + " is on another host, in another pid namespace, or another user's, than rank 0";
    }
  }
  return std::nullopt;
}

bool off_everywhere(const std::vector<std::string>& records) {
  return std::all_of(records.begin(), records.end(), [](const std::string& record) {
    return read_fields(record).at("enabled") != "1";
  });
}

// Why a step of the vote failed; nothing when every rank said yes.
std::optional<std::string> first_no(const std::vector<std::string>& answers) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const Fields answer = read_fields(answers[rank]);
    const auto no = answer.find("no");
    if (no != answer.end()) return "rank " + std::to_string(rank) + ": " + no->second;
  }
  return std::nullopt;
}

// Why a device may not be read over the link to it; empty when it may.
std::string link_objection(Link link, const Rendezvous::Options& options) {
  switch (link) {
    case Link::kNone:
      return "no peer access between the devices";
    case Link::kSameDevice:
      return options.allow_same_device ? ""
                                       : "two ranks on one device, where every copy is a kernel "
                                         "(PG_SDMA_ALLOW_SAME_DEVICE=1 for tests)";
    case Link::kPcie:
      return options.allow_pcie ? "" : "PCIe between the devices (PG_SDMA_ALLOW_PCIE=1 allows it)";
    default:
      return "";
  }
}

std::chrono::microseconds spin_for(int world) {
  // To sleep and be woken takes as long as a small gather. But spinning only pays when every rank
  // has a core to itself while it does.
  return static_cast<unsigned>(world) <= std::thread::hardware_concurrency()
             ? std::chrono::microseconds(200)
             : std::chrono::microseconds(0);
}

}  // namespace

Rendezvous::Rendezvous(Options options, std::shared_ptr<Board> board)
    : options_(std::move(options)), board_(std::move(board)) {}

std::string Rendezvous::key(const std::string& step, int rank) const {
  return options_.lane + "/" + step + "/" + std::to_string(rank);
}

void Rendezvous::post(const std::string& step, const std::string& value) {
  board_->post(key(step, options_.rank), value);
}

std::vector<std::string> Rendezvous::collect(const std::string& step,
                                             std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options_.world; ++rank) keys.push_back(key(step, rank));
  std::vector<std::string> values;
  std::string missing;
  for (std::optional<std::string>& value : board_->collect(keys, timeout)) {
    if (!value) missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(values.size());
    values.push_back(std::move(value).value_or(""));
  }
  if (!missing.empty()) {
    throw std::runtime_error(
        "rank " + std::to_string(options_.rank) + ": the first direct operation of group " +
        options_.group + " waited " + std::to_string(timeout.count()) + " ms in vain for " +
        missing + " to make it (step " + step + " of the vote). Look for that rank's error.");
  }
  return values;
}

void Rendezvous::join() {
  post("join", write_fields({{"protocol", kProtocol},
                             {"enabled", options_.enabled ? "1" : "0"},
                             {"settings", one_line(options_.settings)},
                             {"host", host_identity()}}));
}

Rendezvous::Result Rendezvous::vote(const EngineFactory& factory, const SelfTest& self_test,
                                    std::chrono::milliseconds timeout) {
  const auto records = collect("join", timeout);
  if (const auto no = objection(records)) return {nullptr, *no, off_everywhere(records)};

  // Step 1: an engine here, and on rank 0 the control page.
  std::shared_ptr<Engine> engine;
  std::optional<ControlPage> page;
  Fields answer;
  try {
    if (options_.let_peers_read) let_peers_read();
    engine = factory();
    answer = {{"identity", one_line(engine->identity())}, {"pid", std::to_string(getpid())}};
    if (options_.rank == 0) {
      page.emplace(ControlPage::create(options_.world, options_.ring));
      answer["page"] = std::to_string(page->descriptor());
      answer["nonce"] = std::to_string(page->nonce());
    }
  } catch (const std::exception& error) {
    answer = {{"no", one_line(error.what())}};
  }
  post("engine", write_fields(answer));
  const auto engines = collect("engine", timeout);
  if (const auto no = first_no(engines)) return {nullptr, *no, false};

  // Step 2: every rank maps the page and can build the transport.
  std::vector<std::string> identities;
  std::vector<int> pids;
  for (const std::string& text : engines) {
    const Fields fields = read_fields(text);
    identities.push_back(fields.at("identity"));
    pids.push_back(std::stoi(fields.at("pid")));
  }
  std::unique_ptr<DirectPull> transport;
  answer = {{"yes", ""}};
  try {
    for (int rank = 0; rank < options_.world; ++rank) {
      if (rank == options_.rank) continue;
      const std::string why = link_objection(engine->link_to(identities[rank]), options_);
      if (!why.empty()) throw CannotShare(why + ", to rank " + std::to_string(rank));
    }
    if (!page) {
      const Fields owner = read_fields(engines[0]);
      page.emplace(ControlPage::attach(pids[0], std::stoi(owner.at("page")),
                                       std::stoull(owner.at("nonce")), options_.world,
                                       options_.ring));
    }
    DirectPull::Options options;
    options.group = options_.group;
    options.rank = options_.rank;
    options.world = options_.world;
    options.ring = options_.ring;
    options.spin = spin_for(options_.world);
    transport = std::make_unique<DirectPull>(options, engine, std::move(*page), identities,
                                             std::make_unique<Peers>(pids));
  } catch (const std::exception& error) {
    answer = {{"no", one_line(error.what())}};
  }
  post("mapped", write_fields(answer));
  if (const auto no = first_no(collect("mapped", timeout))) return {nullptr, *no, false};
  transport->page().close_descriptor();

  // Step 3: bytes arrive.
  answer = {{"yes", ""}};
  std::string wrong;
  try {
    wrong = self_test(*transport);
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  if (!wrong.empty()) {
    answer = {{"no", one_line(wrong)}};
    // Peers may be waiting for this rank's part in the rest of the test.
    transport->abort("rank " + std::to_string(options_.rank) + " failed its self-test: " + wrong);
  }
  post("tested", write_fields(answer));
  if (const auto no = first_no(collect("tested", timeout))) return {nullptr, *no, false};
  // Only now: a rank that is late for the self-test is no reason to do without the transport.
  transport->set_patience(options_.patience.value_or(
      engine->stream_ordered() ? kStreamPatience : std::chrono::microseconds(0)));
  return {std::move(transport), "", false};
}

}  // namespace pg_sdma
