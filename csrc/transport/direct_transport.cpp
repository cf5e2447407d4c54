#include "transport/direct_transport.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "engine/inject.h"
#include "transport/cores.h"

namespace pg_sdma {
namespace {

// FNV-1a over words: equal calls hash alike on every rank, and a mismatch is told by the records.
class Fingerprint {
 public:
  void add(uint64_t value) {
    for (int i = 0; i < 8; ++i, value >>= 8) hash_ = (hash_ ^ (value & 0xff)) * 0x100000001b3;
  }
  void add(const std::string& text) {
    for (const char c : text) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    add(text.size());
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

// A stream that waits for a dead peer cannot be released without letting what follows compute on
// bytes that never came, so the process ends, as it does with NCCL.
[[noreturn]] void end_process(const std::string& why) {
  std::fprintf(stderr, "pg_sdma: %s Ending this process.\n", why.c_str());
  std::fflush(stderr);
  std::abort();
}

template <size_t N>
void put(char (&field)[N], const std::string& text) {
  std::snprintf(field, N, "%s", text.c_str());
}

}  // namespace

// The page as Agreement sees it: copies records where they are needed and rings who may sleep.
class DirectTransport::PageView {
 public:
  explicit PageView(DirectTransport& self) : self_(self), page_(self.page_) {}

  uint64_t verdict(uint64_t slot) { return page_.verdict(slot); }
  bool swap_verdict(uint64_t slot, uint64_t expected, uint64_t desired) {
    const bool first = page_.swap_verdict(slot, expected, desired);
    // Who waits for the last record or acknowledgement hears that rank's bell, and finds out
    // "direct" by itself.
    if (first && Verdict::unpack(desired).outcome != Outcome::kDirect) page_.ring_all();
    return first;
  }
  uint64_t record_number(int rank, uint64_t slot) { return page_.record_number(rank, slot); }
  CallSummary copy_record(int rank, uint64_t slot) {
    page_.copy_record(rank, slot, self_.records_[rank]);
    return self_.records_[rank].summary;
  }
  void hide_record(int rank, uint64_t slot) { page_.hide_record(rank, slot); }
  void write_record(int rank, uint64_t slot) { page_.write_record(rank, slot, self_.own_); }
  void show_record(int rank, uint64_t slot, uint64_t number) {
    page_.show_record(rank, slot, number);
    page_.ring_bell(rank);
  }
  uint64_t acknowledged(int rank) { return page_.acknowledged(rank); }
  void acknowledge(int rank, uint64_t number) {
    page_.acknowledge(rank, number);
    page_.ring_bell(rank);
  }
  uint64_t consumed(int rank) { return page_.consumed(rank); }
  void consume(int rank, uint64_t number) {
    page_.consume(rank, number);
    page_.ring_bell(rank);
  }

 private:
  DirectTransport& self_;
  ControlPage& page_;
};

DirectTransport::DirectTransport(Options options, std::shared_ptr<Engine> engine, ControlPage page,
                                 std::vector<std::string> identities, std::unique_ptr<Peers> peers)
    : options_(std::move(options)),
      engine_(std::move(engine)),
      page_(std::move(page)),
      peers_(std::move(peers)),
      slots_(page_, options_.rank, options_.world,
             std::min(Slots::kMostLead, page_.slots().count / 2)),
      sharing_(options_.rank, engine_, page_, std::move(identities)),
      // A device takes what it is given into its page tables, and needs the counters alone.
      queue_(engine_->queue(page_.data(),
                            engine_->stream_ordered() ? page_.counters_size() : page_.size())),
      records_(options_.world) {
  if (engine_->stream_ordered()) {
    watchdog_ = std::make_unique<Watchdog>(page_, *peers_, options_.group, options_.rank,
                                           options_.world, [this](const std::string& why) {
                                             if (options_.on_fault) options_.on_fault(why);
                                             end_process(why);
                                           });
  }
}

DirectTransport::~DirectTransport() {
  // The watchdog is there meanwhile: a stream that waits for a peer that is gone would hold the
  // driver at the process's end.
  queue_.reset();
  watchdog_.reset();
  // Only then: who has departed while peers still count on it is a fault to them.
  page_.depart(options_.rank);
}

Decision DirectTransport::agree(const Call& call) {
  inject::at("agree");
  check_fault();
  carrying_ = false;
  earlier_.reset();
  page_.tell_core(options_.rank, this_core());
  own_ = describe(call);
  Agreement<PageView> agreement(options_.rank, options_.world, options_.ring,
                                engine_->opens_exports() && !courier_);
  agreement.start(++number_, own_.summary);

  PageView view(*this);
  using Progress = Agreement<PageView>::Progress;
  started_ = Clock::now();
  const Deadline timeout = started_ + call.timeout;
  const uint64_t shard = call.total_bytes() / static_cast<uint64_t>(options_.world);
  wait_policy_.begin(started_, (options_.world - 1) * shard,
                     wait_policy_.asks_who_is_behind() ? operations_behind() : 0);
  std::shared_ptr<Queue::Marker> before;  // what the device has to do first
  const auto busy = [&] {
    if (!before) before = queue_->mark_caller();
    return !before->passed();
  };
  // When this rank stops waiting, or looks whether to.
  const auto until = [&](Deadline now) {
    if (!wait_policy_.ends() || !agreement.may_give_up()) return timeout;
    return std::min(
        timeout, agreement.waits_for_record() ? wait_policy_.until(now, busy) : wait_policy_.end());
  };
  std::string why_not;
  std::string error;
  for (;;) {
    const uint32_t heard = page_.bell(agreement.waiting_for());
    const Progress progress = agreement.step(view);
    if (progress == Progress::kDone) break;
    if (progress == Progress::kOpen) {
      agreement.opened(open_exports(call, why_not));
    } else if (progress == Progress::kBlocked) {
      const Deadline now = Clock::now();
      const Deadline deadline = until(now);
      if (now < deadline) {
        await(agreement.waiting_for(), heard, deadline);
      } else if (deadline == timeout) {
        fail(who_is_missing(call, agreement.waiting_for(), "has not made this call"));
      } else {
        wait_policy_.waited_in_vain();
        agreement.give_up(has_room_to_defer(call));
      }
    }
    // The records that explain an error may be reused once this rank has consumed it.
    if (agreement.verdict().outcome == Outcome::kError && error.empty()) {
      error = explain_error();
    }
  }

  const Verdict& verdict = agreement.verdict();
  if (verdict.outcome == Outcome::kDirect) wait_policy_.met();
  // Whatever the call: ranks that have deferred theirs count on this one.
  const bool maybe = verdict.outcome == Outcome::kDeferred || agreement.lapped();
  if (page_.late() > 0 && maybe && arrive(call, agreement.lapped())) return {true, "", ""};
  if (verdict.outcome != Outcome::kDirect) sharing_.settle(number_, /*direct=*/false);
  if (verdict.outcome == Outcome::kDirect) return {true, "", ""};
  if (verdict.outcome == Outcome::kError) throw BadCall(error);
  // A peer has decided without seeing this rank's record.
  if (!call.invalid.empty()) throw BadCall(call.invalid);
  if (verdict.outcome == Outcome::kLate) return {false, "late", "late"};
  const bool here = own_.summary.state == CallState::kUnshareable;
  const char* otherwise = call.reduces() ? "memory that cannot be shared, or no kernel"
                                         : "memory that cannot be shared";
  return {false, why_not.empty() ? otherwise : why_not, here ? std::string(own_.why) : why_not};
}

void DirectTransport::guarded(const std::function<void()>& body) {
  try {
    body();
  } catch (const GroupFault&) {
    throw;
  } catch (const CopyFailed& error) {
    std::string who;
    for (int peer = 0; peer < options_.world; ++peer) {
      if (static_cast<uint64_t>(peers_->pid(peer)) != error.space) continue;
      who = "the memory of rank " + std::to_string(peer) + " cannot be read, look at its output: ";
    }
    fail_carrying(who + error.what());
  } catch (const std::exception& error) {
    fail_carrying(error.what());
  }
}

std::string DirectTransport::way() const {
  if (courier_) return courier_->name();
  if (slots_.any()) return "slots";
  return pushes() ? "push" : "pull";
}

void DirectTransport::abort(const std::string& why) { page_.set_fault(options_.rank, why); }

std::vector<Region> DirectTransport::reached(const Call& call) const {
  return pushes(call) ? call.targets() : call.regions();
}

CallRecord DirectTransport::describe(const Call& call) {
  CallRecord record;
  put(record.operation, call.operation);
  put(record.dtype, call.dtype);
  put(record.reduction, call.reduction);
  const std::vector<Region> regions = reached(call);
  record.tensors = static_cast<uint32_t>(regions.size());
  const std::vector<uint64_t> shards = call.shards();
  record.pulls = asks_for_pull(call) ? 1 : 0;
  record.call_tensors = static_cast<uint32_t>(shards.size());
  for (const uint64_t bytes : shards) {
    record.total_bytes += bytes * static_cast<uint64_t>(options_.world);
  }
  if (!call.invalid.empty()) {
    record.summary.state = CallState::kInvalid;
    put(record.why, call.invalid);
    return record;
  }
  Fingerprint fingerprint;
  fingerprint.add(call.operation);
  fingerprint.add(call.dtype);
  fingerprint.add(call.reduction);
  // Of the whole call, so that its parts agree, or fail, all alike.
  for (const uint64_t bytes : shards) fingerprint.add(bytes);
  record.summary.signature = fingerprint.value();
  try {
    if (!call.unable.empty()) throw CannotShare(call.unable);
    if (regions.size() > record.places.size()) {
      throw CannotShare("more tensors of a rank than one operation carries");
    }
    const bool read_by_peers = !courier_ || call.reduces();
    const bool read_directly = read_by_peers && !always_through_slots(call);
    for (size_t t = 0; read_by_peers && t < regions.size(); ++t) {
      if (regions[t].bytes == 0) continue;
      if (read_directly) engine_->check_readable(regions[t].data);
      record.places[t] = sharing_.publish(regions[t].data, regions[t].bytes, number_ + 1);
    }
  } catch (const CannotShare& error) {
    record.summary.state = CallState::kUnshareable;
    put(record.why, error.what());
  }
  return record;
}

bool DirectTransport::open_exports(const Call& call, std::string& why_not) {
  try {
    const std::vector<Region> regions = reached(call);
    for (int peer = 0; peer < options_.world; ++peer) {
      if (peer != options_.rank) open_exports_of(peer, regions, Sharing::kBriefly);
    }
    return true;
  } catch (const CannotShare& error) {
    why_not = error.what();
    return false;
  }
}

void DirectTransport::open_exports_of(int peer, const std::vector<Region>& regions,
                                      std::chrono::milliseconds retry) {
  for (size_t t = 0; t < regions.size(); ++t) {
    const Place& place = records_[peer].places[t];
    const size_t bytes = regions[t].bytes;  // the same on every rank: the records agree
    if (bytes == 0) continue;
    const Mapping found = sharing_.open(peer, place.export_id, number_, retry);
    if (bytes > found.bytes || place.offset > found.bytes - bytes) {
      throw CannotShare("a tensor outside of its export");
    }
  }
}

uint64_t DirectTransport::operations_behind() const {
  uint64_t behind = 0;
  for (int rank = 0; rank < options_.world; ++rank) {
    const uint64_t consumed = page_.consumed(rank);
    if (consumed + 1 < number_) behind = std::max(behind, number_ - 1 - consumed);
  }
  return behind;
}

void DirectTransport::check() {
  check_fault();
  check_peers();
}

void DirectTransport::abandon(bool copies) {
  if (copies) sharing_.keep_open();
  page_.ready(options_.rank) = number_.load();
  page_.done(options_.rank) = number_.load();
}

void DirectTransport::check_fault() const {
  if (!page_.faulted()) return;
  const std::string why = page_.fault();
  if (options_.on_fault) options_.on_fault(why);
  throw GroupFault(why);
}

void DirectTransport::fail(const std::string& text) {
  page_.set_fault(options_.rank, text);
  check_fault();
  throw GroupFault(text);  // not reached: the fault is set, by this rank or before
}

// Peers count on this rank after a direct verdict: it cannot just leave.
void DirectTransport::fail_carrying(const std::string& why) {
  // The self-test tells the peers, but where they wait in the call itself.
  const bool told = !watched_ && (engine_->stream_ordered() || courier_);
  if (told) throw std::runtime_error("the self-test failed: " + why);
  fail(this_operation() + ": " + why);
}

}  // namespace pg_sdma
