#include "transport/memory/control_page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/inject.h"
#include "transport/memory/control_page_layout.h"

namespace pg_sdma {
namespace {

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, limit, nullptr, 0);
}

}  // namespace

uint64_t random_nonce() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  return nonce;
}

size_t ControlPage::bytes(int world, uint64_t ring) {
  return Layout::Offsets(static_cast<size_t>(world), ring).end;
}

size_t ControlPage::counters_size() const {
  const size_t end = Layout::Offsets(static_cast<size_t>(world_), ring_).verdicts;
  return (end + kPage - 1) / kPage * kPage;
}

ControlPage::ControlPage(int descriptor, size_t size, int world, uint64_t ring)
    : size_(size), descriptor_(descriptor), world_(world), ring_(ring) {
  void* const base = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    ::close(descriptor);
    throw std::system_error(error, std::generic_category(), "mmap of the control page");
  }
  base_.reset(base, [size = size_](void* mapped) { munmap(mapped, size); });
}

ControlPage ControlPage::share() const {
  ControlPage other(*this);
  other.descriptor_ = -1;
  return other;
}

ControlPage ControlPage::create(int world, uint64_t ring, const SlotShape& slots, uint64_t late,
                                uint64_t tickets) {
  inject::at("memfd");
  const int descriptor = memfd_create("pg_sdma", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  // Allocate now: a page that the kernel cannot back must fail here, not by SIGBUS later. But not
  // the tickets, most of which are never posted.
  const size_t before =
      pages(bytes(world, ring) + lines(slot_bytes(slots, world)) + late_bytes(late, world));
  const size_t size = before + ticket_bytes(tickets, world);
  int error = posix_fallocate(descriptor, 0, static_cast<off_t>(before));
  if (error == 0 && ftruncate(descriptor, static_cast<off_t>(size)) != 0) error = errno;
  if (error != 0) {
    ::close(descriptor);
    throw std::system_error(error, std::generic_category(), "allocating the control page");
  }
  // Nobody can shrink it under the others, who would end by SIGBUS.
  fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  ControlPage page(descriptor, size, world, ring);
  // The file reads as zeros, which is the initial state of everything but the header.
  Layout& layout = page.layout();
  layout.magic = kMagic;
  layout.nonce = random_nonce();
  layout.world = static_cast<uint64_t>(world);
  layout.ring = ring;
  layout.slots = page.slots_ = slots;
  layout.late = page.late_ = late;
  layout.tickets = page.tickets_ = tickets;
  return page;
}

ControlPage ControlPage::attach(int pid, int descriptor, uint64_t nonce, int world, uint64_t ring) {
  inject::at("attach");
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) throw std::system_error(errno, std::generic_category(), "opening " + path);
  struct stat status{};
  const size_t least = bytes(world, ring);
  if (fstat(own, &status) != 0 || static_cast<size_t>(status.st_size) < least) {
    ::close(own);
    throw std::runtime_error(path + " is not the control page: wrong size");
  }
  ControlPage page(own, static_cast<size_t>(status.st_size), world, ring);
  const Layout& layout = page.layout();
  if (layout.magic != kMagic || layout.nonce != nonce) {
    throw std::runtime_error(path + " is not the control page: wrong nonce");
  }
  page.slots_ = layout.slots;
  page.late_ = layout.late;
  page.tickets_ = layout.tickets;
  if (page.size_ != page.tickets_at() + ticket_bytes(page.tickets_, world)) {
    throw std::runtime_error(path + " is not the control page: wrong slots");
  }
  page.close_descriptor();
  return page;
}

ControlPage::ControlPage(ControlPage&& other) noexcept
    : base_(std::move(other.base_)),
      size_(other.size_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      world_(other.world_),
      ring_(other.ring_),
      slots_(other.slots_),
      late_(other.late_),
      tickets_(other.tickets_) {}

ControlPage::~ControlPage() { close_descriptor(); }

void ControlPage::close_descriptor() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

uint64_t ControlPage::nonce() const { return layout().nonce; }

uint64_t ControlPage::verdict(uint64_t slot) const { return layout().verdict(slot).load(); }

bool ControlPage::swap_verdict(uint64_t slot, uint64_t expected, uint64_t desired) {
  return layout().verdict(slot).compare_exchange_strong(expected, desired);
}

uint64_t ControlPage::record_number(int rank, uint64_t slot) const {
  return layout().record(rank, slot).number.load();
}

void ControlPage::hide_record(int rank, uint64_t slot) {
  layout().record(rank, slot).number = 0;
  std::atomic_thread_fence(std::memory_order_release);
}

void ControlPage::write_record(int rank, uint64_t slot, const CallRecord& record) {
  layout().record(rank, slot).write(record, bytes_in_use(record));
}

void ControlPage::show_record(int rank, uint64_t slot, uint64_t number) {
  layout().record(rank, slot).number = number;
}

void ControlPage::copy_record(int rank, uint64_t slot, CallRecord& into) const {
  read_record(layout().record(rank, slot), into);
}

uint64_t ControlPage::acknowledged(int rank) const { return layout().of(rank).acknowledged; }
void ControlPage::acknowledge(int rank, uint64_t number) {
  layout().of(rank).acknowledged = number;
}
uint64_t ControlPage::consumed(int rank) const { return layout().of(rank).consumed; }
void ControlPage::consume(int rank, uint64_t number) { layout().of(rank).consumed = number; }

size_t ControlPage::late_at() const {
  return bytes(world_, ring_) + lines(slot_bytes(slots_, world_));
}
uint64_t ControlPage::arrived(uint64_t slot) const { return layout().at<Counter>(late_at())[slot]; }
bool ControlPage::swap_arrived(uint64_t slot, uint64_t expected, uint64_t desired) {
  return layout().at<Counter>(late_at())[slot].compare_exchange_strong(expected, desired);
}
void ControlPage::write_arrival(int rank, uint64_t slot, const CallRecord& record) {
  auto* records = layout().at<Slot<CallRecord>>(late_at() + late_records_at(late_));
  records[rank * late_ + slot].write(record, bytes_in_use(record));
}
void ControlPage::copy_arrival(int rank, uint64_t slot, CallRecord& into) const {
  auto* records = layout().at<Slot<CallRecord>>(late_at() + late_records_at(late_));
  read_record(records[rank * late_ + slot], into);
}
uint64_t ControlPage::caught_up(int rank) const { return layout().of(rank).caught_up; }
void ControlPage::catch_up(int rank, uint64_t number) { layout().of(rank).caught_up = number; }

void ControlPage::depart(int rank) {
  layout().of(rank).departed = 1;
  ring_bell(rank);
}
void ControlPage::tell_core(int rank, int core) { layout().of(rank).core = 1 + core; }
int ControlPage::core(int rank) const { return layout().of(rank).core - 1; }

bool ControlPage::departed(int rank) const { return layout().of(rank).departed != 0; }

void ControlPage::note_elsewhere(int rank, const char* operation) {
  RankLines& lines = layout().of(rank);
  std::array<uint64_t, 4> name{};
  std::memcpy(name.data(), operation, std::min(std::strlen(operation), sizeof name - 1));
  // A reader may see one name's half and another's: it is for messages.
  for (size_t i = 0; i < name.size(); ++i) {
    lines.elsewhere_name[i].store(name[i], std::memory_order_relaxed);
  }
  lines.elsewhere.store(lines.elsewhere.load(std::memory_order_relaxed) + 1,
                        std::memory_order_relaxed);
}

std::pair<uint64_t, std::string> ControlPage::elsewhere(int rank) const {
  const RankLines& lines = layout().of(rank);
  std::array<uint64_t, 4> name{};
  for (size_t i = 0; i < name.size(); ++i) name[i] = lines.elsewhere_name[i];
  char text[sizeof name];
  std::memcpy(text, name.data(), sizeof name);
  return {lines.elsewhere, std::string(text, strnlen(text, sizeof text))};
}

uint64_t ControlPage::called(int rank) const {
  uint64_t last = layout().of(rank).consumed;
  for (uint64_t slot = 0; slot < ring_; ++slot) last = std::max(last, record_number(rank, slot));
  return last;
}

Counter& ControlPage::ready(int rank) { return layout().of(rank).ready; }
Counter& ControlPage::done(int rank) { return layout().of(rank).done; }
uint64_t ControlPage::ready(int rank) const { return layout().of(rank).ready; }
uint64_t ControlPage::done(int rank) const { return layout().of(rank).done; }
Counter& ControlPage::filled(int rank) { return layout().of(rank).filled; }
uint64_t ControlPage::filled(int rank) const { return layout().of(rank).filled; }

char* ControlPage::slot(int rank, uint64_t index) const {
  const uint64_t before = static_cast<uint64_t>(rank) * slots_.count + index;
  return static_cast<char*>(base_.get()) + bytes(world_, ring_) + before * slots_.bytes;
}

int ControlPage::writer(const Counter& counter) const {
  const auto* lines = reinterpret_cast<const char*>(&layout().of(0));
  return static_cast<int>((reinterpret_cast<const char*>(&counter) - lines) /
                          static_cast<ptrdiff_t>(sizeof(RankLines)));
}

bool ControlPage::set_fault(int reporter, const std::string& text) {
  uint64_t nobody = 0;
  if (!layout().fault_claim.compare_exchange_strong(nobody, 1 + static_cast<uint64_t>(reporter))) {
    return false;
  }
  FaultText fault{};
  text.copy(fault.text, sizeof fault.text - 1);
  layout().fault.write(fault);
  layout().fault.number = 1;
  ring_all();
  return true;
}

bool ControlPage::faulted() const { return layout().fault_claim != 0; }

std::string ControlPage::fault() const {
  // The text follows the claim at once, unless its writer died between the two.
  for (int i = 0; i < 1000 && layout().fault.number == 0; ++i) usleep(10);
  if (layout().fault.number == 0) {
    return "rank " + std::to_string(layout().fault_claim - 1) + " reported a fault and died";
  }
  FaultText fault{};
  layout().fault.read(fault);
  fault.text[sizeof fault.text - 1] = 0;
  return fault.text;
}

void ControlPage::ring_bell(int rank) {
  RankLines& lines = layout().of(rank);
  lines.bell.fetch_add(1);
  if (lines.sleepers.load() != 0) futex(&lines.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void ControlPage::ring_all() {
  for (int rank = 0; rank < world_; ++rank) ring_bell(rank);
}

uint32_t ControlPage::bell(int rank) const { return layout().of(rank).bell.load(); }

void ControlPage::sleep(int rank, uint32_t heard, std::chrono::microseconds limit) {
  RankLines& lines = layout().of(rank);
  const auto us = limit.count();
  const timespec timeout{us / 1000000, us % 1000000 * 1000};
  lines.sleepers.fetch_add(1);
  futex(&lines.bell, FUTEX_WAIT, heard, &timeout);
  lines.sleepers.fetch_sub(1);
}

}  // namespace pg_sdma
