#include "transport/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "engine/host.h"
#include "engine/inject.h"
#include "transport/arrival.h"
#include "transport/cores.h"
#include "transport/vote_records.h"

namespace pg_sdma {
namespace {

constexpr const char* kProtocol = "6";

// How often a waiting rank looks whether those it waits for still live.
constexpr std::chrono::milliseconds kFirstLook{50};
constexpr std::chrono::milliseconds kLook{500};

constexpr const char* kFailedTest = " failed its self-test: ";

// Why there may be no copies over the link to a device; empty when there may.
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

// Whether every rank may have a core to itself.
bool a_core_each(int world) { return world <= allowed_cores(); }

std::chrono::microseconds spin_for(int world) {
  // To sleep and be woken takes as long as a small gather. But spinning only pays when every rank
  // has a core to itself while it does.
  return std::chrono::microseconds(a_core_each(world) ? 200 : 0);
}

// Slots need every rank at work at the same time; pulls do not.
SlotShape slots_for(const Rendezvous::Options& options, const Engine& engine) {
  if (!options.slots || engine.stream_ordered() || !a_core_each(options.world)) return {};
  return Slots::shape(options.world, ControlPage::bytes(options.world, options.ring));
}

// Operations at a time for which ranks may come one after the other: some steps of a model with
// many layers, because a host may run as far ahead of another.
constexpr uint64_t kMostLate = 128;

// How many of them; none where streams share hardware queues: a wait for a late rank would hold up
// what that rank needs of another group.
uint64_t late_for(const Rendezvous::Options& options, const Engine& engine) {
  const bool can = options.defer && engine.pushes() && !engine.shares_hardware_queues();
  return can && options.world <= Arrived::kMostRanks ? kMostLate : 0;
}

// Rank 0's measurement, as all ranks hear it.
std::string tell(const CopySpeed& speed) {
  return std::to_string(speed.bytes_per_second) + (speed.both_ways_at_once ? " both" : " one");
}

CopySpeed hear_speed(const std::string& text) {
  CopySpeed speed;
  std::string ways;
  std::istringstream(text) >> speed.bytes_per_second >> ways;
  speed.both_ways_at_once = ways == "both";
  return speed;
}

}  // namespace

Rendezvous::Rendezvous(Options options, std::shared_ptr<Board> board)
    : options_(std::move(options)), board_(std::move(board)) {}

std::string Rendezvous::key(const std::string& step, int rank) const {
  return options_.lane + "/" + attempt_ + step + "/" + std::to_string(rank);
}

void Rendezvous::post(const std::string& step, const std::string& value) {
  inject::at(step == "join" ? "join" : ("voted-" + step).c_str());
  board_->post(key(step, options_.rank), value);
}

std::vector<std::string> Rendezvous::collect(const std::string& step, Clock::time_point deadline) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options_.world; ++rank) keys.push_back(key(step, rank));
  for (std::chrono::milliseconds look = kFirstLook;; look = std::min(2 * look, kLook)) {
    // Before the board is asked: what a rank posted before it ended counts.
    std::vector<bool> ended(keys.size(), false);
    for (size_t rank = 0; peers_ && rank < keys.size(); ++rank) {
      ended[rank] = peers_->gone(static_cast<int>(rank));
    }
    const bool last = Clock::now() + look >= deadline;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    const auto patience = last ? std::max(left, std::chrono::milliseconds(0)) : look;
    std::vector<std::string> values;
    std::string missing;
    for (std::optional<std::string>& value : board_->collect(keys, patience)) {
      const size_t rank = values.size();
      const std::string who = "rank " + std::to_string(rank);
      if (!value && ended[rank]) {
        fail("waits for " + who + ", whose process has ended (look at its output for the cause)",
             step);
      }
      if (!value) missing += (missing.empty() ? "" : ", ") + who;
      if (!value && last) missing += first_operation_of(static_cast<int>(rank));
      values.push_back(std::move(value).value_or(""));
    }
    if (missing.empty()) return values;
    if (last) {
      fail("waited " + std::to_string(timeout_.count()) + " ms in vain for " + missing +
               " to make it. Look for that rank's error",
           step);
    }
  }
}

void Rendezvous::fail(const std::string& what, const std::string& step) const {
  throw std::runtime_error("rank " + std::to_string(options_.rank) +
                           ": the first direct operation of group " + options_.group + " " + what +
                           " (step " + step + " of the vote).");
}

void Rendezvous::note_elsewhere(const std::string& operation) {
  if (!options_.enabled || !first_elsewhere_.empty()) return;
  first_elsewhere_ = operation;
  try {
    board_->post(key("elsewhere", options_.rank), operation);
  } catch (const std::exception&) {
    // It is for a message alone, and the inner has its own errors of a store that is gone.
  }
}

// Of a rank that has begun as this one did, it says nothing.
std::string Rendezvous::first_operation_of(int rank) const {
  const std::optional<std::string> first =
      board_->collect({key("elsewhere", rank)}, std::chrono::milliseconds(0)).at(0);
  if (!first || *first == first_elsewhere_) return "";
  return " (whose first operation in this group was " + *first + ")";
}

void Rendezvous::join() {
  post("join", write_fields({{"protocol", kProtocol},
                             {"enabled", options_.enabled ? "1" : "0"},
                             {"settings", one_line(options_.settings)},
                             {"host", host_identity()},
                             {"offer", options_.offer ? "1" : "0"},
                             {"no_sums", one_line(options_.no_sums)},
                             {"pid", std::to_string(getpid())}}));
}

std::optional<std::string> Rendezvous::ask(const std::string& step, const std::string& answer,
                                           Clock::time_point deadline) {
  post(step, answer);
  return first_no(collect(step, deadline));
}

Rendezvous::Result Rendezvous::vote(const EngineFactory& engine, const SelfTest& self_test,
                                    std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  const auto deadline = Clock::now() + timeout;
  const auto records = collect("join", deadline);
  if (const auto no = objection(records)) return {nullptr, *no, off_everywhere(records), "", ""};
  std::vector<int> pids;
  for (const std::string& text : records) pids.push_back(std::stoi(read_fields(text).at("pid")));
  struct AtEnd {
    std::unique_ptr<Peers>& peers;
    ~AtEnd() { peers.reset(); }
  } at_end{peers_};

  Result peer_copies;
  if (options_.peer_copies) {
    peer_copies = attempt({false, engine, self_test, records, pids, deadline});
    if (peer_copies.transport) return peer_copies;
  }
  if (!all_have_offers(records)) {
    if (!options_.peer_copies) peer_copies.reason = options_.no_offer;
    return peer_copies;
  }
  // Keys of another attempt are new ones: what a rank says of peer copies stays on the board.
  attempt_ = "courier-";
  Result sends = attempt({true, engine, self_test, records, pids, deadline});
  attempt_.clear();
  if (sends.transport) {
    sends.no_peer_copies = peer_copies.reason;
  } else if (!peer_copies.reason.empty() && peer_copies.reason != sends.reason) {
    sends.reason = peer_copies.reason + "; and by mori: " + sends.reason;
  }
  return sends;
}

std::unique_ptr<DirectTransport> Rendezvous::make_transport(std::shared_ptr<Engine> engine,
                                                            std::optional<ControlPage> page,
                                                            const std::vector<std::string>& engines,
                                                            const std::vector<int>& pids) const {
  std::vector<std::string> identities;
  for (const std::string& text : engines) identities.push_back(read_fields(text).at("identity"));
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
  DirectTransport::Options options;
  options.group = options_.group;
  options.rank = options_.rank;
  options.world = options_.world;
  options.ring = options_.ring;
  options.spin = spin_for(options_.world);
  options.on_fault = options_.on_fault;
  return std::make_unique<DirectTransport>(options, std::move(engine), std::move(*page), identities,
                                           std::make_unique<Peers>(pids));
}

Rendezvous::Result Rendezvous::attempt(const Attempt& asked) {
  const auto& [by_courier, factory, self_test, records, pids, deadline] = asked;

  // Step 1: an engine here, what a courier needs, and on rank 0 the control page.
  std::shared_ptr<Engine> engine;
  std::shared_ptr<CourierOffer> offer;
  std::optional<ControlPage> page;
  Fields answer;
  try {
    inject::at("watch");
    if (!peers_) peers_ = std::make_unique<Peers>(pids);
    inject::at("engine");
    engine = factory();
    // What has to be opened has an access check of its own.
    if (options_.let_peers_read && !engine->opens_exports()) let_peers_read();
    answer = {{"identity", one_line(engine->identity())}};
    if (by_courier) {
      offer = options_.offer();
      answer["word"] = one_line(offer->prepare());
    }
    if (options_.rank == 0) {
      page.emplace(ControlPage::create(
          options_.world, options_.ring, offer ? SlotShape{} : slots_for(options_, *engine),
          offer ? 0 : late_for(options_, *engine), engine->opens_exports() ? options_.tickets : 0));
      answer["page"] = std::to_string(page->descriptor());
      answer["nonce"] = std::to_string(page->nonce());
    }
  } catch (const std::exception& error) {
    answer = {{"no", one_line(error.what())}};
  }
  post("engine", write_fields(answer));
  const auto engines = collect("engine", deadline);
  if (const auto no = first_no(engines)) return {nullptr, *no, false, "", ""};

  // Step 2: every rank maps the page and can build the transport.
  std::unique_ptr<DirectTransport> transport;
  answer = {{"yes", ""}};
  try {
    transport = make_transport(engine, std::move(page), engines, pids);
  } catch (const std::exception& error) {
    answer = {{"no", one_line(error.what())}};
  }
  if (const auto no = ask("mapped", write_fields(answer), deadline)) {
    return {nullptr, *no, false, "", ""};
  }
  transport->page().close_descriptor();

  // Only now that nothing else keeps a rank from it: those that have come wait for the others.
  if (offer) {
    answer = {{"yes", ""}};
    try {
      transport->use(offer->join(read_fields(engines[0]).at("word")));
    } catch (const std::exception& error) {
      answer = {{"no", one_line(error.what())}};
    }
    if (const auto no = ask("joined", write_fields(answer), deadline)) {
      return {nullptr, *no, false, "", ""};
    }
  }

  // Step 3: bytes arrive.
  answer = {{"yes", ""}};
  std::string wrong;
  const char* kind = kRefused;
  try {
    wrong = self_test(*transport);
    kind = kFound;
  } catch (const GroupFault& fault) {
    wrong = fault.what();
    kind = kHeard;
    // A peer that is gone or stalls: then this rank raises, and so must whoever goes on.
    if (wrong.find(kFailedTest) == std::string::npos) answer["broken"] = one_line(wrong);
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  if (!wrong.empty()) {
    answer["no"] = one_line(wrong);
    answer["kind"] = kind;
    // Peers may be waiting for this rank's part in the rest of the test.
    transport->abort("rank " + std::to_string(options_.rank) + kFailedTest + wrong);
  }
  if (options_.rank == 0) answer["copies"] = tell(transport->copy_speed());
  post("tested", write_fields(answer));
  const auto answers = collect("tested", deadline);
  for (const std::string& text : answers) {
    const Fields fields = read_fields(text);
    if (const auto broken = fields.find("broken"); broken != fields.end()) {
      fail("failed in its vote: " + broken->second, "tested");
    }
  }
  if (const auto no = first_no(answers)) return {nullptr, *no, false, "", ""};
  // Only now: a rank that is late for the self-test is no reason to do without the transport.
  if (options_.patience) {
    transport->set_wait_policy(WaitPolicy::fixed(*options_.patience));
  } else if (engine->stream_ordered()) {
    const Fields measured = read_fields(answers[0]);
    transport->set_wait_policy(WaitPolicy::by_cost(hear_speed(measured.at("copies"))));
  }
  std::string sums = no_sums(records);
  // What peer copies could not do is not done for reduce-scatters either.
  if (offer && engine->stream_ordered() && sums.empty()) sums = "mori carries all-gathers alone";
  return {std::move(transport), "", false, sums, ""};
}

}  // namespace pg_sdma
