#include "backend/log/flight_recorder.h"

#include <chrono>

namespace pg_sdma {
namespace {

int64_t now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

const char* name_of(FlightRecorder::State state) {
  switch (state) {
    case FlightRecorder::State::kScheduled:
      return "scheduled";
    case FlightRecorder::State::kStarted:
      return "started";
    case FlightRecorder::State::kIssued:
      return "issued";
    case FlightRecorder::State::kEnqueued:
      return "enqueued";
    case FlightRecorder::State::kCompleted:
      return "completed";
    case FlightRecorder::State::kFailed:
      return "failed";
  }
  return "";
}

FlightRecorder::FlightRecorder(size_t entries) : slots_(entries) {}

uint64_t FlightRecorder::add(const Made& made) {
  if (slots_.empty()) return 0;
  const uint64_t id = last_.load(kRelaxed) + 1;
  Slot& slot = slots_[id % slots_.size()];
  slot.id.store(0, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.operation.store(made.operation, kRelaxed);
  slot.input_elements.store(made.input_elements, kRelaxed);
  slot.output_elements.store(made.output_elements, kRelaxed);
  slot.dtype.store(static_cast<int>(made.dtype), kRelaxed);
  slot.tensors.store(made.tensors, kRelaxed);
  slot.async.store(made.async, kRelaxed);
  slot.timeout_ms.store(made.timeout_ms, kRelaxed);
  slot.state.store(State::kScheduled, kRelaxed);
  slot.number.store(0, kRelaxed);
  slot.reason.store(nullptr, kRelaxed);
  slot.stream.store(0, kRelaxed);
  slot.created_ns.store(now_ns(), kRelaxed);
  slot.started_ns.store(0, kRelaxed);
  slot.decided_ns.store(0, kRelaxed);
  slot.issued_ns.store(0, kRelaxed);
  slot.ended_ns.store(0, kRelaxed);
  slot.id.store(id, std::memory_order_release);
  last_.store(id, kRelaxed);
  return id;
}

void FlightRecorder::start(uint64_t id, uintptr_t stream) {
  Slot* const slot = find(id);
  if (slot == nullptr) return;
  slot->stream.store(stream, kRelaxed);
  slot->started_ns.store(now_ns(), kRelaxed);
  slot->state.store(State::kStarted, kRelaxed);
}

void FlightRecorder::route(uint64_t id, uint64_t number, const std::string* reason) {
  Slot* const slot = find(id);
  if (slot == nullptr) return;
  slot->number.store(number, kRelaxed);
  slot->reason.store(reason, kRelaxed);
  if (reason != nullptr) slot->decided_ns.store(now_ns(), kRelaxed);
}

void FlightRecorder::end(uint64_t id, State state) {
  Slot* const slot = find(id);
  if (slot == nullptr) return;
  const int64_t now = now_ns();
  slot->issued_ns.store(now, kRelaxed);
  if (state == State::kCompleted || state == State::kFailed) slot->ended_ns.store(now, kRelaxed);
  slot->state.store(state, kRelaxed);
}

std::vector<FlightRecorder::Entry> FlightRecorder::entries() const {
  std::vector<Entry> entries;
  const uint64_t last = last_.load();
  const uint64_t first = last > slots_.size() ? last - slots_.size() + 1 : 1;
  for (uint64_t id = first; id <= last; ++id) {
    Entry entry;
    if (read(slots_[id % slots_.size()], entry) && entry.id == id) entries.push_back(entry);
  }
  return entries;
}

FlightRecorder::Slot* FlightRecorder::find(uint64_t id) {
  if (id == 0) return nullptr;
  Slot& slot = slots_[id % slots_.size()];
  return slot.id.load(std::memory_order_acquire) == id ? &slot : nullptr;
}

const std::string* FlightRecorder::keep(const std::string& reason) {
  std::lock_guard<std::mutex> lock(reasons_mutex_);
  return &*reasons_.insert(reason).first;
}

bool FlightRecorder::read(const Slot& slot, Entry& into) {
  into.id = slot.id.load(std::memory_order_acquire);
  into.made = {
      slot.operation.load(kRelaxed),       slot.input_elements.load(kRelaxed),
      slot.output_elements.load(kRelaxed), static_cast<c10::ScalarType>(slot.dtype.load(kRelaxed)),
      slot.tensors.load(kRelaxed),         slot.async.load(kRelaxed),
      slot.timeout_ms.load(kRelaxed)};
  into.state = slot.state.load(kRelaxed);
  into.number = slot.number.load(kRelaxed);
  if (const std::string* reason = slot.reason.load(kRelaxed)) {
    into.route = reason->empty() || *reason == kInOrderOfArrival ? "direct" : "inner";
    into.reason = *reason;
  }
  into.stream = slot.stream.load(kRelaxed);
  into.created_ns = slot.created_ns.load(kRelaxed);
  into.started_ns = slot.started_ns.load(kRelaxed);
  into.decided_ns = slot.decided_ns.load(kRelaxed);
  into.issued_ns = slot.issued_ns.load(kRelaxed);
  into.ended_ns = slot.ended_ns.load(kRelaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return into.id != 0 && slot.id.load(kRelaxed) == into.id;
}

}  // namespace pg_sdma
