// The tickets of a control page: of each rank a table in which a ticket lies at its home, which its
// export's id gives, or as close behind as there is room. Memory is taken as tickets are posted.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "transport/memory/control_page.h"
#include "transport/memory/control_page_layout.h"

namespace pg_sdma {
namespace {

constexpr int kPopulateForWriting = 23;  // MADV_POPULATE_WRITE, which older headers lack

// Whether there is memory behind a slot: touching what the kernel cannot back ends the process.
bool back(const TicketSlot& slot) {
  const auto address = reinterpret_cast<uintptr_t>(&slot);
  const uintptr_t start = address / kPage * kPage;
  const size_t length = pages(address + sizeof slot - start);
  if (madvise(reinterpret_cast<void*>(start), length, kPopulateForWriting) == 0) return true;
  return errno != ENOMEM && errno != EFAULT;  // kernels before 5.14 do not know the request
}

uintptr_t page_of_end(const TicketSlot& slot) {
  return (reinterpret_cast<uintptr_t>(&slot + 1) - 1) / kPage;
}

}  // namespace

size_t ControlPage::tickets_at() const { return pages(late_at() + late_bytes(late_, world_)); }

TicketSlot& ControlPage::ticket(int rank, uint64_t nth) const {
  return layout().at<TicketSlot>(tickets_at())[rank * tickets_ + nth % tickets_];
}

TicketSlot* ControlPage::find_ticket_slot(int rank, uint64_t export_id) const {
  // What a peer has written is taken for no more than it can be.
  const uint64_t reach = layout().of(rank).ticket_reach;
  for (uint64_t i = 0; i < tickets_ && i <= reach; ++i) {
    TicketSlot& slot = ticket(rank, export_id + i);
    if (slot.number == export_id) return &slot;
  }
  return nullptr;
}

bool ControlPage::post_ticket(int rank, const Ticket& ticket,
                              const std::function<bool(uint64_t)>& replace) {
  RankLines& own = layout().of(rank);
  const auto put = [&](uint64_t i) {
    TicketSlot& slot = this->ticket(rank, ticket.export_id + i);
    slot.number = 0;
    slot.write(ticket);
    own.ticket_reach = std::max<uint64_t>(own.ticket_reach, i);
    slot.number = ticket.export_id;
    return true;
  };
  uintptr_t backed = 0;
  for (uint64_t i = 0; i < tickets_; ++i) {
    const TicketSlot& slot = this->ticket(rank, ticket.export_id + i);
    if (page_of_end(slot) != backed && !back(slot)) return false;
    backed = page_of_end(slot);
    if (slot.number == 0) return put(i);
  }
  for (uint64_t i = 0; i < tickets_; ++i) {
    if (!replace(this->ticket(rank, ticket.export_id + i).number)) continue;
    put(i);
    ++own.tickets_withdrawn;
    return true;
  }
  return false;
}

void ControlPage::withdraw_ticket(int rank, uint64_t export_id) {
  TicketSlot* slot = find_ticket_slot(rank, export_id);
  // Unless another ticket has come into its slot meanwhile.
  if (slot == nullptr || !slot->number.compare_exchange_strong(export_id, 0)) return;
  ++layout().of(rank).tickets_withdrawn;
}

bool ControlPage::find_ticket(int rank, uint64_t export_id, Ticket& into) const {
  const TicketSlot* slot = find_ticket_slot(rank, export_id);
  if (slot == nullptr) return false;
  slot->read(into);
  std::atomic_thread_fence(std::memory_order_acquire);
  return slot->number == export_id;
}

uint64_t ControlPage::tickets_withdrawn(int rank) const {
  return layout().of(rank).tickets_withdrawn;
}

}  // namespace pg_sdma
