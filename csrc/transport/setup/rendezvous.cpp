#include "transport/setup/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "engine/host.h"
#include "engine/inject.h"
#include "transport/agreement/late_protocol.h"
#include "transport/health/cores.h"
#include "transport/setup/vote_records.h"

namespace pg_sdma {
namespace {

constexpr const char* kProtocol = "6";

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
  return StagingBuffers::shape(options.world, ControlPage::bytes(options.world, options.ring));
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
    : options_(std::move(options)),
      roll_call_({options_.group, options_.lane, options_.rank, options_.world, host_identity()},
                 std::move(board)) {}

void Rendezvous::join() {
  inject::at("join");
  roll_call_.announce(record());
}

Fields Rendezvous::record() const {
  return {{"protocol", kProtocol},
          {"enabled", options_.enabled ? "1" : "0"},
          {"settings", one_line(options_.settings)},
          {"host", host_identity()},
          {"offer", options_.offer ? "1" : "0"},
          {"no_sums", one_line(options_.no_sums)},
          {"pid", std::to_string(getpid())}};
}

std::vector<std::string> Rendezvous::ask(const std::string& step, const std::string& answer) {
  inject::at(("voted-" + step).c_str());
  return roll_call_.ask(attempt_ + step, answer);
}

Rendezvous::Result Rendezvous::vote(const EngineFactory& engine, const SelfTest& self_test,
                                    std::chrono::milliseconds timeout) {
  roll_call_.begin(timeout);
  Result result = decide(engine, self_test, Clock::now() + timeout);
  roll_call_.end();
  return result;
}

Rendezvous::Result Rendezvous::decide(const EngineFactory& engine, const SelfTest& self_test,
                                      Clock::time_point deadline) {
  const auto records = roll_call_.ask("join", write_fields(record()));
  if (const auto no = objection(records)) {
    return {nullptr, *no, off_everywhere(records), "", "", no->rfind(kSettingsDiffer, 0) == 0};
  }
  std::vector<int> pids;
  for (const std::string& text : records) pids.push_back(std::stoi(read_fields(text).at("pid")));

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
  attempt_ = "external-";
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
  const auto& [external, factory, self_test, records, pids, deadline] = asked;

  // Step 1: an engine here, what an external all-gather needs, and on rank 0 the control page.
  std::shared_ptr<Engine> engine;
  std::shared_ptr<ExternalOffer> offer;
  std::optional<ControlPage> page;
  Fields answer;
  try {
    inject::at("watch");
    roll_call_.watch(pids);
    inject::at("engine");
    engine = factory();
    // What has to be opened has an access check of its own.
    if (options_.let_peers_read && !engine->opens_exports()) let_peers_read();
    answer = {{"identity", one_line(engine->identity())}};
    if (external) {
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
  const auto engines = ask("engine", write_fields(answer));
  if (const auto no = first_no(engines)) return {nullptr, *no, false, "", "", false};

  // Step 2: every rank maps the page and can build the transport.
  std::unique_ptr<DirectTransport> transport;
  answer = {{"yes", ""}};
  try {
    transport = make_transport(engine, std::move(page), engines, pids);
  } catch (const std::exception& error) {
    answer = {{"no", one_line(error.what())}};
  }
  if (const auto no = first_no(ask("mapped", write_fields(answer)))) {
    return {nullptr, *no, false, "", "", false};
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
    if (const auto no = first_no(ask("joined", write_fields(answer)))) {
      return {nullptr, *no, false, "", "", false};
    }
  }

  // Step 3: bytes arrive.
  answer = {{"yes", ""}};
  std::string wrong;
  CopySpeed copies;
  const char* kind = kRefused;
  try {
    const TestResult result = self_test(*transport);
    wrong = result.wrong;
    copies = result.copies;
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
  if (options_.rank == 0) answer["copies"] = tell(copies);
  const auto answers = ask("tested", write_fields(answer));
  for (const std::string& text : answers) {
    const Fields fields = read_fields(text);
    if (const auto broken = fields.find("broken"); broken != fields.end()) {
      roll_call_.fail("failed in its vote: " + broken->second, "tested");
    }
  }
  if (const auto no = first_no(answers)) return {nullptr, *no, false, "", "", false};
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
  return {std::move(transport), "", false, sums, "", false};
}

}  // namespace pg_sdma
