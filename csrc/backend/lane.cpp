#include "backend/lane.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdio>

#include "backend/store_board.h"
#include "transport/enqueuing.h"

namespace pg_sdma {
namespace {

// How long leave() waits for what is pending in a group that is broken, which it looks at so often.
constexpr std::chrono::seconds kGrace{2};
constexpr std::chrono::milliseconds kLook{100};

// A torch that was not built for a device has no streams of it, and no tensors on it either.
std::unique_ptr<Chain> make_chain(c10::DeviceType device) {
  const bool has_streams = device != c10::kCPU && c10::impl::hasDeviceGuardImpl(device);
  return has_streams ? make_stream_chain(device) : make_host_chain();
}

}  // namespace

Lane::Lane(std::shared_ptr<const Group> group, c10::DeviceType device,
           c10::intrusive_ptr<c10d::Backend> inner)
    : group_(std::move(group)),
      device_(device),
      inner_(std::move(inner)),
      inner_name_(inner_->getBackendName()),
      timeout_(group_->timeout),
      recorder_(group_->settings.trace_entries),
      direct_(recorder_.keep("")),
      deferred_(recorder_.keep(FlightRecorder::kInOrderOfArrival)),
      not_ours_(recorder_.keep("not an operation that goes direct")),
      rendezvous_(vote_options(),
                  std::make_shared<StoreBoard>(group_->store, [this] { return fault(); })),
      chain_(make_chain(device)) {
  rendezvous_.join();
  flight_record::add(this);
}

Lane::~Lane() {
  flight_record::remove(this);
  if (!fork_guard_.forked()) {
    leave(/*process_ends=*/false);
    return;
  }
  // Left to the end of the process: destroyed here, they would wait for threads that exist only in
  // the parent, and tell the peers that the parent has gone.
  inner_.release();
  (void)chain_.release();
  (void)new std::shared_ptr<DirectTransport>(transport_);
}

WorkPtr Lane::run(std::shared_ptr<Collective> collective) {
  check_fork();
  if (group_->settings.enabled && collective->facts.total_bytes >= ready_from_) {
    collective->get_ready();
  }
  std::lock_guard<std::timed_mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "rank ", group_->rank, ": ",
                   collective->call.operation, ": group ", group_->name, " has been destroyed");
  if (collective->call.timeout.count() <= 0) collective->call.timeout = timeout_.load();
  collective->inner = inner_name_;
  add_to_record(*collective);
  try {
    // A worker that is busy decides in its turn. It also votes for asynchronous calls, which must
    // not hold up their caller: a peer may be waiting for what the caller does next.
    const bool later = chain_->busy() || (chain_->has_worker() && collective->async && !voted_ &&
                                          !collective->facts.coalescing);
    if (!later) {
      prepare(*collective);
      const std::string refusal = static_refusal(collective->facts, policy_);
      if (!refusal.empty()) return take_inner(*collective, refusal);
    }
    return chain_->run(std::move(collective), *this);
  } catch (const BadCall& error) {
    // The exception that the device's usual inner throws: gloo a RuntimeError, NCCL a ValueError.
    TORCH_CHECK(device_ != c10::kCPU, error.what());
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const GroupFault& error) {
    TORCH_CHECK_WITH(DistBackendError, false, error.what());
  }
}

std::vector<WorkPtr> Lane::carry(Collective& collective) {
  if (!voted_) prepare(collective);
  if (recorder_.on()) {
    void* stream = nullptr;
    if (device_ != c10::kCPU) {
      const c10::Device device = collective.device();
      stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    }
    recorder_.start(collective.record, reinterpret_cast<uintptr_t>(stream));
  }
  try {
    return carry_parts(collective);
  } catch (const GroupFault&) {
    throw;  // it has neither ended nor failed: what it waits for is what the record is for
  } catch (const std::exception&) {
    recorder_.end(collective.record, FlightRecorder::State::kFailed);
    throw;
  }
}

std::vector<WorkPtr> Lane::carry_parts(Collective& collective) {
  std::vector<WorkPtr> pending;
  const auto add = [&](const WorkPtr& work) {
    if (work) pending.push_back(work);
  };
  if (const std::string refusal = static_refusal(collective.facts, policy_); !refusal.empty()) {
    add(take_inner(collective, refusal));
    return pending;
  }
  collective.lay_out();
  const size_t tensors = collective.tensors();
  size_t first = 0;
  bool all_direct = true;
  do {
    const size_t last = std::min<size_t>(tensors, first + kMaxTensors);
    const Call part = collective.part(first, last);
    recorder_.route(collective.record, transport_->number() + 1, nullptr);  // while it is undecided
    auto alone = enqueue_alone(one_at_a_time_);
    const Operation operation = transport_->agree(part);
    const Decision& decision = operation.decision;
    stats_.count(part.operation, decision.reason, part.total_bytes());
    if (recorder_.on()) {
      const std::string* why = !decision.direct                  ? recorder_.keep(decision.reason)
                               : operation.in_order_of_arrival() ? deferred_
                                                                 : direct_;
      recorder_.route(collective.record, operation.number, why);
    }
    if (decision.direct) {
      RECORD_FUNCTION("sdma::" + part.operation + " direct", std::vector<c10::IValue>());
      run_direct(collective, part, operation);
    } else {
      if (alone) alone.unlock();
      all_direct = false;
      refuse_silence(collective, decision.reason);
      transport_->note_elsewhere(collective.name());
      chain_->before_inner();
      for (const WorkPtr& work : collective.part_on_inner(*inner_, first, last)) {
        chain_->after_inner(work);
        add(work);
      }
    }
    first = last;
  } while (first < tensors);
  using State = FlightRecorder::State;
  const State ended = engine_->stream_ordered() ? State::kEnqueued : State::kCompleted;
  recorder_.end(collective.record, all_direct ? ended : State::kIssued);
  return pending;
}

// Were a failure here this rank's alone, its next operation would write counters that release the
// peers from this one, without its shard.
void Lane::run_direct(Collective& collective, const Call& part, const Operation& operation) {
  try {
    chain_->before_direct(transport_->queue());
    collective.run(*transport_, part, operation);
  } catch (const GroupFault&) {
    throw;
  } catch (const std::exception& error) {
    transport_->cannot_begin(operation, error.what());
  }
}

WorkPtr Lane::take_inner(Collective& collective, const std::string& reason) {
  if (recorder_.on()) recorder_.route(collective.record, 0, recorder_.keep(reason));
  recorder_.end(collective.record, FlightRecorder::State::kFailed);  // unless it comes to be issued
  if (!collective.call.invalid.empty()) throw BadCall(collective.call.invalid);
  refuse_silence(collective, reason);
  stats_.count(collective.call.operation, reason, collective.facts.total_bytes);
  note_elsewhere(collective.name());
  chain_->before_inner();
  WorkPtr work = collective.on_inner(*inner_);
  chain_->after_inner(work);
  recorder_.end(collective.record, FlightRecorder::State::kIssued);
  return work;
}

void Lane::refuse_silence(const Collective& collective, const std::string& reason) const {
  TORCH_CHECK(!group_->settings.strict || off_everywhere_, "rank ", group_->rank,
              ": PG_SDMA_STRICT=1: ", collective.call.operation, " of group ", group_->name,
              " would use the inner backend ", inner_->getBackendName(), ": ", reason, " (",
              collective.facts.total_bytes, " bytes in ", collective.facts.tensors,
              collective.facts.tensors == 1 ? " tensor)" : " tensors)",
              "; remove what keeps it from going direct, or unset PG_SDMA_STRICT");
}

// For the messages of peers that are at another call.
void Lane::note_elsewhere(const char* operation) {
  if (transport_) transport_->note_elsewhere(operation);
  if (!voted_) rendezvous_.note_elsewhere(operation);
}

void Lane::prepare(Collective& collective) {
  if (const std::string why = fault(); !why.empty()) throw GroupFault(why);
  if (!engine_ && !voted_) make_engine(collective.device());
  collective.facts.capturing = engine_ && engine_->capturing();
  if (!voted_ && !collective.facts.capturing && !collective.facts.coalescing) vote();
}

void Lane::shutdown() {
  if (fork_guard_.forked()) return;
  leave(/*process_ends=*/false);
  std::lock_guard<std::timed_mutex> lock(mutex_);
  closed_ = true;
}

void Lane::detach() {
  if (!fork_guard_.forked()) leave(/*process_ends=*/true);
}

// As NCCL and gloo, it waits for what is pending: peers count on that, and it ends by its own
// deadline at the latest. A call in another thread is as good as pending.
void Lane::leave(bool process_ends) {
  std::lock_guard<std::mutex> leaving(leaving_);
  await_end([this](std::chrono::milliseconds limit) { return chain_->await_idle(limit); });
  chain_->stop(process_ends);
  std::unique_lock<std::timed_mutex> lock(mutex_, std::defer_lock);
  await_end([&lock](std::chrono::milliseconds limit) { return lock.try_lock_for(limit); });
  if (!lock) lock.lock();
  voted_ = true;
  policy_.refusal = "the process is exiting";
  if (transport_) transport_->drain();  // while abort() can reach it
  std::shared_ptr<DirectTransport> transport;
  {
    std::lock_guard<std::mutex> fault_lock(fault_mutex_);
    transport.swap(transport_);
  }
  transport.reset();
  chain_->let_go();
}

// Of a broken group's operations some never end, as the inner's that peers do not make any more.
void Lane::await_end(const std::function<bool(std::chrono::milliseconds)>& ended) {
  std::optional<Clock::time_point> until;
  while (!ended(kLook)) {
    if (!until && broken()) until = Clock::now() + kGrace;
    if (!until || Clock::now() < *until) continue;
    end("rank " + std::to_string(group_->rank) + " destroyed group " + group_->name +
        " with operations pending");
    return;
  }
}

bool Lane::broken() const {
  std::lock_guard<std::mutex> lock(fault_mutex_);
  return !fault_.empty() || (transport_ && transport_->page().faulted());
}

void Lane::abort() {
  if (fork_guard_.forked()) return;
  end("rank " + std::to_string(group_->rank) + " aborted group " + group_->name);
}

void Lane::end(const std::string& why) {
  std::shared_ptr<DirectTransport> transport;
  {
    std::lock_guard<std::mutex> lock(fault_mutex_);
    if (fault_.empty()) fault_ = why;
    transport = transport_;
  }
  chain_->abandon(why);
  if (transport) transport->abort(why);
}

void Lane::add_to_record(Collective& collective) {
  if (!recorder_.on()) return;
  FlightRecorder::Made made{collective.name()};
  CallSizes::fill(made, collective.outputs(), collective.inputs());
  made.async = collective.async;
  made.timeout_ms = collective.call.timeout.count();
  collective.record = recorder_.add(made);
}

void Lane::record_fault(const std::string& why) {
  if (group_->settings.trace_file.empty() || fault_recorded_.exchange(true)) return;
  const auto own = static_cast<size_t>(group_->rank);
  const auto& ranks = group_->global_ranks;
  const std::string failed = flight_record::write(
      group_->settings.trace_file, own < ranks.size() ? ranks[own] : group_->rank, why);
  if (!failed.empty()) std::fprintf(stderr, "pg_sdma: no flight record: %s\n", failed.c_str());
}

LaneRecord Lane::record() const {
  LaneRecord record;
  record.group = group_->name;
  record.device = c10::DeviceTypeName(device_, /*lower_case=*/true);
  record.inner = inner_name_;
  record.rank = group_->rank;
  record.global_ranks = group_->global_ranks;
  record.capacity = recorder_.capacity();
  record.recorded = recorder_.recorded();
  record.entries = recorder_.entries();
  // The lock keeps the transport there without owning it: the last owner joins its threads, and
  // this may be one of them.
  std::lock_guard<std::mutex> lock(fault_mutex_);
  record.fault = fault_;
  if (transport_) {
    record.number = transport_->number();
    record.ranks = transport_->progress();
    if (record.fault.empty() && transport_->page().faulted()) {
      record.fault = transport_->page().fault();
    }
  }
  return record;
}

std::string Lane::way() const {
  std::lock_guard<std::mutex> lock(fault_mutex_);
  return way_;
}

std::string Lane::fault() const {
  std::lock_guard<std::mutex> lock(fault_mutex_);
  return fault_;
}

void Lane::check_fork() const {
  TORCH_CHECK(!fork_guard_.forked(), "rank ", group_->rank, ": group ", group_->name,
              " was made before this process was forked and cannot be used here; make a new group "
              "in the child, or start it with the spawn method");
}

}  // namespace pg_sdma
