// The control page: host shared memory of one group. Records, counters and verdicts live here;
// every rank maps it, the CPU reads all of it, and GPU engines wait and write on its counters.
// Behind it may lie slots, which carry bytes of CPU tensors, the records of late operations, and
// the tickets of exports.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "transport/agreement/call_record.h"
#include "transport/clock.h"

namespace pg_sdma {

// The slots of each rank behind the page (transport/schedule/staged.h); none where `count` is 0.
struct SlotShape {
  uint64_t count = 0;
  uint64_t bytes = 0;  // of one slot
};

template <class T, size_t kAlignment>
struct Slot;
using TicketSlot = Slot<Ticket, sizeof(Counter)>;

// A number that no other process has drawn.
uint64_t random_nonce();

class ControlPage {
 public:
  static size_t bytes(int world, uint64_t ring);  // without what may lie behind it

  // Creates the page as an anonymous file; `descriptor()` is open until close_descriptor(). `late`:
  // operations whose ranks may come one after the other (transport/agreement/late_protocol.h) at a
  // time; each takes 1216 bytes a rank. `tickets`: exports of one rank that its peers can look up
  // at a time; they take memory once they are posted.
  static ControlPage create(int world, uint64_t ring, const SlotShape& slots = {},
                            uint64_t late = 0, uint64_t tickets = 0);
  // Maps the page that process `pid` holds open as `descriptor`. Throws std::runtime_error with the
  // reason when it cannot, or when it is not the page whose nonce is `nonce`.
  static ControlPage attach(int pid, int descriptor, uint64_t nonce, int world, uint64_t ring);

  // Another handle to this mapping, for ranks that are threads of one process.
  ControlPage share() const;

  ControlPage(ControlPage&& other) noexcept;
  ControlPage& operator=(ControlPage&&) = delete;
  ~ControlPage();

  int descriptor() const { return descriptor_; }
  uint64_t nonce() const;
  void close_descriptor();
  void* data() const { return base_.get(); }
  // Without the tickets, which no engine has to reach.
  size_t size() const { return tickets_at(); }
  size_t counters_size() const;  // from data() on: all counters of the data path lie there

  // -- the single accesses that Agreement takes
  uint64_t verdict(uint64_t slot) const;
  bool swap_verdict(uint64_t slot, uint64_t expected, uint64_t desired);
  uint64_t record_number(int rank, uint64_t slot) const;
  void hide_record(int rank, uint64_t slot);
  void write_record(int rank, uint64_t slot, const CallRecord& record);
  void show_record(int rank, uint64_t slot, uint64_t number);
  void copy_record(int rank, uint64_t slot, CallRecord& into) const;
  uint64_t acknowledged(int rank) const;
  void acknowledge(int rank, uint64_t number);
  uint64_t consumed(int rank) const;
  void consume(int rank, uint64_t number);

  // -- the same of Arrival
  uint64_t late() const { return late_; }
  uint64_t arrived(uint64_t slot) const;
  bool swap_arrived(uint64_t slot, uint64_t expected, uint64_t desired);
  void write_arrival(int rank, uint64_t slot, const CallRecord& record);
  void copy_arrival(int rank, uint64_t slot, CallRecord& into) const;
  uint64_t caught_up(int rank) const;
  void catch_up(int rank, uint64_t number);

  // -- a rank that has left the group, and so will never act again
  void depart(int rank);
  bool departed(int rank) const;

  // -- the core that a rank was on when it last told: a hint. -1: not known
  void tell_core(int rank, int core);
  int core(int rank) const;

  // -- what only messages use: collectives that a rank has given to the inner, and the last one's
  // name, cut off at 31 characters. Cheap: no bell.
  void note_elsewhere(int rank, const char* operation);
  std::pair<uint64_t, std::string> elsewhere(int rank) const;
  // The last operation that a rank has published or agreed on.
  uint64_t called(int rank) const;

  // -- counters of the data path, written by the engine
  Counter& ready(int rank);
  Counter& done(int rank);
  uint64_t ready(int rank) const;
  uint64_t done(int rank) const;

  // -- slots: the last wave that a rank has put into its own, and where they are
  SlotShape slots() const { return slots_; }
  char* slot(int rank, uint64_t index) const;
  Counter& filled(int rank);
  uint64_t filled(int rank) const;

  // The rank that writes one of the counters of the data path.
  int writer(const Counter& counter) const;

  // -- tickets of one rank's exports, found by export id
  // Of an export that has none. It replaces another only where all places are taken: the first that
  // `replace` is true of, given the export's id. False where there is none, or no memory.
  bool post_ticket(
      int rank, const Ticket& ticket,
      const std::function<bool(uint64_t)>& replace = [](uint64_t) { return true; });
  void withdraw_ticket(int rank, uint64_t export_id);
  // How many tickets a rank has withdrawn or replaced: what has not changed needs no other look.
  uint64_t tickets_withdrawn(int rank) const;
  // False when the owner has withdrawn or replaced the ticket.
  bool find_ticket(int rank, uint64_t export_id, Ticket& into) const;

  // -- the sticky fault: set once, by the first rank that sees the group broken. Later ones lose.
  bool set_fault(int reporter, const std::string& text);
  bool faulted() const;
  std::string fault() const;

  // -- sleeping. A rank rings its own bell after each of its own acts, and everybody's after a
  // verdict that others do not find out from acknowledgements.
  void ring_bell(int rank);
  void ring_all();
  uint32_t bell(int rank) const;
  // Sleeps until rank's bell differs from `heard` or `limit` passes.
  void sleep(int rank, uint32_t heard, std::chrono::microseconds limit);

 private:
  struct Layout;
  ControlPage(int descriptor, size_t size, int world, uint64_t ring);
  ControlPage(const ControlPage&) = default;
  size_t late_at() const;  // the offset of what late operations need
  size_t tickets_at() const;
  TicketSlot& ticket(int rank, uint64_t nth) const;
  TicketSlot* find_ticket_slot(int rank, uint64_t export_id) const;
  Layout& layout() const { return *static_cast<Layout*>(base_.get()); }

  std::shared_ptr<void> base_;
  size_t size_ = 0;
  int descriptor_ = -1;
  int world_ = 0;
  uint64_t ring_ = 0;
  // As the page says: what a peer writes there later changes nothing here.
  SlotShape slots_;
  uint64_t late_ = 0;
  uint64_t tickets_ = 0;
};

}  // namespace pg_sdma
