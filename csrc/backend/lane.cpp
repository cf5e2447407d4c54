#include "backend/lane.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

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
      log_(group_, inner_name_),
      setup_(
          group_, device, inner_name_,
          {[this] { return fault(); }, [this](const std::string& why) { log_.write_fault(why); }}),
      chain_(make_chain(device)) {
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
  if (group_->settings.enabled && collective->facts.total_bytes >= setup_.ready_from()) {
    collective->get_ready();
  }
  std::lock_guard<std::timed_mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "rank ", group_->rank, ": ",
                   collective->call.operation, ": group ", group_->name, " has been destroyed");
  if (collective->call.timeout.count() <= 0) collective->call.timeout = timeout_.load();
  collective->inner = inner_name_;
  log_.add(*collective);
  try {
    // A worker that is busy decides in its turn. It also votes for asynchronous calls, which must
    // not hold up their caller: a peer may be waiting for what the caller does next.
    const bool later = chain_->busy() || (chain_->has_worker() && collective->async &&
                                          !setup_.voted() && !collective->facts.coalescing);
    if (!later) {
      prepare(*collective);
      const std::string refusal = static_refusal(collective->facts, setup_.policy());
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
  if (!setup_.voted()) prepare(collective);
  log_.start(collective, [&] {
    void* stream = nullptr;
    if (device_ != c10::kCPU) {
      const c10::Device device = collective.device();
      stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    }
    return reinterpret_cast<uintptr_t>(stream);
  });
  try {
    return carry_parts(collective);
  } catch (const GroupFault&) {
    throw;  // it has neither ended nor failed: what it waits for is what the record is for
  } catch (const std::exception&) {
    log_.end(collective, FlightRecorder::State::kFailed);
    throw;
  }
}

std::vector<WorkPtr> Lane::carry_parts(Collective& collective) {
  std::vector<WorkPtr> pending;
  const auto add = [&](const WorkPtr& work) {
    if (work) pending.push_back(work);
  };
  const std::string refusal = static_refusal(collective.facts, setup_.policy());
  if (!refusal.empty()) {
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
    log_.undecided(collective, transport_->number() + 1);
    auto alone = enqueue_alone(setup_.one_at_a_time());
    const Operation operation = transport_->agree(part);
    log_.decided(collective, part, operation);
    if (operation.decision.direct) {
      RECORD_FUNCTION("sdma::" + part.operation + " direct", std::vector<c10::IValue>());
      run_direct(collective, part, operation);
    } else {
      if (alone) alone.unlock();
      all_direct = false;
      raise_if_strict(collective, operation.decision.reason);
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
  const State ended = setup_.engine().stream_ordered() ? State::kEnqueued : State::kCompleted;
  log_.end(collective, all_direct ? ended : State::kIssued);
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
  log_.refused(collective, reason);
  if (!collective.call.invalid.empty()) throw BadCall(collective.call.invalid);
  raise_if_strict(collective, reason);
  log_.count_inner(collective, reason);
  note_elsewhere(collective.name());
  chain_->before_inner();
  WorkPtr work = collective.on_inner(*inner_);
  chain_->after_inner(work);
  log_.issued(collective.record);
  return work;
}

// What all ranks have switched off is not missed.
void Lane::raise_if_strict(const Collective& collective, const std::string& reason) const {
  if (!setup_.off_everywhere()) log_.raise_if_strict(collective, reason);
}

// For the messages of peers that are at another call.
void Lane::note_elsewhere(const char* operation) {
  if (transport_) transport_->note_elsewhere(operation);
  setup_.note_elsewhere(operation);
}

void Lane::prepare(Collective& collective) {
  if (const std::string why = fault(); !why.empty()) throw GroupFault(why);
  setup_.make_engine(collective.device());
  collective.facts.capturing = setup_.capturing();
  if (!setup_.voted() && !collective.facts.capturing && !collective.facts.coalescing) vote();
}

void Lane::vote() {
  try {
    GroupSetup::Outcome outcome = setup_.vote(timeout_.load());
    std::lock_guard<std::mutex> lock(fault_mutex_);
    if (!fault_.empty()) throw GroupFault(fault_);  // since the vote
    way_ = outcome.way;
    transport_ = std::move(outcome.transport);
  } catch (const GroupFault& error) {
    end(error.what());
    log_.write_fault(fault());
    throw GroupFault(fault());
  }
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
  setup_.close("the process is exiting");
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

LaneRecord Lane::record() const {
  LaneRecord record;
  log_.fill(record);
  record.device = c10::DeviceTypeName(device_, /*lower_case=*/true);
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
