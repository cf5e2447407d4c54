// Tickets on a control page: all that it has room for are found, whatever their export ids.
#include <cstdio>
#include <cstdlib>

#include "transport/memory/control_page.h"

using pg_sdma::ControlPage;
using pg_sdma::Ticket;

namespace {

constexpr uint64_t kRoom = 128;

ControlPage page = ControlPage::create(2, 2, {}, 0, kRoom);

void post(uint64_t export_id) {
  Ticket ticket;
  ticket.export_id = export_id;
  ticket.bytes = export_id * 1000;
  page.post_ticket(1, ticket);
}

void expect(uint64_t export_id, bool there) {
  Ticket found;
  const bool is_there = page.find_ticket(1, export_id, found);
  if (is_there == there && (!there || found.bytes == export_id * 1000)) return;
  std::fprintf(stderr, "ticket %lu: found %d, expected %d\n", export_id, is_there, there);
  std::exit(1);
}

}  // namespace

int main() {
  // An old export stays while hundreds come and go, as the allocator's segments do.
  for (uint64_t id = 1; id < 10 * kRoom; ++id) {
    if (id > kRoom) page.withdraw_ticket(1, id - kRoom + 3);
    post(id);
    for (const uint64_t old : {1, 2, 3}) expect(old, old <= id);
    expect(id, true);
  }
  const uint64_t last = 10 * kRoom - 1;
  uint64_t lost = 0;
  for (uint64_t id = last + 1; id < last + 10; ++id) {
    const uint64_t withdrawn = page.tickets_withdrawn(1);
    post(id);  // nothing is free: another makes room, which its importers have to hear of
    expect(id, true);
    if (page.tickets_withdrawn(1) == withdrawn + 1) continue;
    std::fprintf(stderr, "nobody hears that ticket %lu has replaced another\n", id);
    return 1;
  }
  for (uint64_t id = 1; id < last + 10; ++id) {
    Ticket found;
    lost += page.find_ticket(1, id, found) ? 0 : 1;
  }
  if (last + 9 - lost != kRoom) {
    std::fprintf(stderr, "%lu tickets are left, not %lu\n", last + 9 - lost, kRoom);
    return 1;
  }
  // What is spared stays, though the new ticket is at home there, and with nothing left to replace
  // there is no new one.
  const uint64_t spared = last + 9;
  Ticket ticket;
  ticket.export_id = spared + kRoom;
  ticket.bytes = ticket.export_id * 1000;
  if (page.post_ticket(1, ticket, [](uint64_t) { return false; })) return 1;
  expect(ticket.export_id, false);
  if (!page.post_ticket(1, ticket, [=](uint64_t id) { return id != spared; })) return 1;
  expect(ticket.export_id, true);
  expect(spared, true);
  page.withdraw_ticket(1, last + 9);
  expect(last + 9, false);
  return 0;
}
