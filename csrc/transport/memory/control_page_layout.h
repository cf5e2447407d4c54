// What lies where on the control page: of control_page.cpp alone.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "transport/memory/control_page.h"

namespace pg_sdma {

constexpr uint64_t kMagic = 0x70675f73646d6134;  // "pg_sdma4"
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

// `bytes`, up to the end of a cache line, or of a page.
constexpr size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
constexpr size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Payloads are copied word by word with relaxed atomics: a reader may race with a rank that laps
// the slot, finds out by the number, and throws the torn copy away.
constexpr size_t words(size_t bytes) { return (bytes + 7) / 8; }

template <class T, size_t kAlignment = kLine>
struct alignas(kAlignment) Slot {
  Counter number{0};
  std::array<Counter, words(sizeof(T))> payload{};

  // The first `bytes` of it: of a value that is only partly in use, lines that nobody needs stay in
  // their readers' caches.
  void write(const T& value, size_t bytes = sizeof(T)) {
    std::array<uint64_t, words(sizeof(T))> raw{};
    std::memcpy(raw.data(), &value, bytes);
    for (size_t i = 0; i < words(bytes); ++i) payload[i].store(raw[i], std::memory_order_relaxed);
  }
  void read(T& value) const { read(value, 0, sizeof(T)); }
  // Bytes [first, last) of it; `first` is a multiple of 8.
  void read(T& value, size_t first, size_t last) const {
    std::array<uint64_t, words(sizeof(T))> raw;
    for (size_t i = first / 8; i < words(last); ++i) {
      raw[i] = payload[i].load(std::memory_order_relaxed);
    }
    std::memcpy(reinterpret_cast<char*>(&value) + first, raw.data() + first / 8, last - first);
  }
};

// What the CPU writes and what the engine writes lie on lines of their own.
struct RankLines {
  alignas(kLine) Counter acknowledged{0};
  Counter consumed{0};
  std::atomic<uint32_t> bell{0};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<uint32_t> departed{0};
  std::atomic<int32_t> core{0};  // 1 + its number; 0: not known
  Counter caught_up{0};
  Counter ticket_reach{0};       // how far from its home a ticket may lie
  Counter tickets_withdrawn{0};  // so far
  alignas(kLine) Counter ready{0};
  alignas(kLine) Counter done{0};
  alignas(kLine) Counter filled{0};
  alignas(kLine) Counter elsewhere{0};  // collectives given to the inner
  std::array<Counter, 4> elsewhere_name{};
};

constexpr size_t kRecordHead = offsetof(CallRecord, places);

inline size_t bytes_in_use(const CallRecord& record) {
  const bool shareable = record.summary.state == CallState::kShareable;
  return kRecordHead + (shareable ? record.tensors * sizeof(Place) : sizeof record.why);
}

inline void read_record(const Slot<CallRecord>& shown, CallRecord& into) {
  shown.read(into, 0, kRecordHead);
  // What a peer has written is taken for no more than it can be.
  into.tensors = std::min<uint32_t>(into.tensors, kMaxTensors);
  shown.read(into, kRecordHead, bytes_in_use(into));
  std::atomic_thread_fence(std::memory_order_acquire);
  into.operation[sizeof into.operation - 1] = 0;
  into.dtype[sizeof into.dtype - 1] = 0;
  into.reduction[sizeof into.reduction - 1] = 0;
  if (into.summary.state != CallState::kShareable) into.why[sizeof into.why - 1] = 0;
}

struct FaultText {
  char text[1016];
};

inline size_t slot_bytes(const SlotShape& slots, int world) {
  return static_cast<size_t>(world) * slots.count * slots.bytes;
}

// Counter arrived[late], Slot<CallRecord>[world][late], each from a new cache line.
inline size_t late_records_at(uint64_t late) { return lines(late * sizeof(Counter)); }
inline size_t late_bytes(uint64_t late, int world) {
  return late_records_at(late) + static_cast<size_t>(world) * late * sizeof(Slot<CallRecord>);
}

inline size_t ticket_bytes(uint64_t tickets, int world) {
  return static_cast<size_t>(world) * tickets * sizeof(TicketSlot);
}

struct ControlPage::Layout {
  uint64_t magic;
  uint64_t nonce;
  uint64_t world;
  uint64_t ring;
  SlotShape slots;
  uint64_t late;
  uint64_t tickets;     // of each rank
  Counter fault_claim;  // 1 + reporter of the fault whose text is being written
  Slot<FaultText> fault;
  // Followed by: RankLines[world], Counter verdict[ring], Slot<CallRecord>[world][ring],
  // each from a new cache line, slots.count slots a rank, what late operations need (late_bytes),
  // and, from a new page, TicketSlot[world][tickets].

  struct Offsets {
    size_t lines, verdicts, records, end;
    Offsets(size_t world, size_t ring) {
      lines = pg_sdma::lines(sizeof(Layout));
      verdicts = pg_sdma::lines(lines + world * sizeof(RankLines));
      records = pg_sdma::lines(verdicts + ring * sizeof(Counter));
      end = pages(records + world * ring * sizeof(Slot<CallRecord>));
    }
  };

  template <class T>
  T* at(size_t offset) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(this) + offset);
  }
  RankLines& of(int rank) { return at<RankLines>(Offsets(world, ring).lines)[rank]; }
  Counter& verdict(uint64_t slot) { return at<Counter>(Offsets(world, ring).verdicts)[slot]; }
  Slot<CallRecord>& record(int rank, uint64_t slot) {
    return at<Slot<CallRecord>>(Offsets(world, ring).records)[rank * ring + slot];
  }
};

}  // namespace pg_sdma
