#include "engine/host.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "engine/past_caches.h"

namespace pg_sdma {
namespace {

// One call moves at most this many bytes (the kernel's MAX_RW_COUNT is a page short of 2 GiB).
constexpr size_t kMostAtOnce = size_t{1} << 30;
constexpr size_t kMostPieces = 64;

void read_from(pid_t process, void* destination, uintptr_t source, size_t bytes) {
  auto* to = static_cast<char*>(destination);
  while (bytes > 0) {
    const size_t part = std::min(bytes, kMostAtOnce);
    iovec local{to, part};
    iovec remote{reinterpret_cast<void*>(source), part};
    const ssize_t moved = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (moved <= 0) {
      throw CopyFailed(static_cast<uint64_t>(process), "process_vm_readv from process " +
                                                           std::to_string(process) + ": " +
                                                           std::strerror(moved < 0 ? errno : EIO));
    }
    to += moved;
    source += static_cast<size_t>(moved);
    bytes -= static_cast<size_t>(moved);
  }
}

// What a rank copies of its own shard before its peers' same bytes: by then the owner of those has
// just read them into the cache that the ranks share (docs/experiments.md has the sizes tried).
constexpr size_t kWave = size_t{256} << 10;

// An output that would fill half of a core's own cache is stored past the caches, which saves
// reading it first. A smaller one is found in the cache by whoever uses it next: reading 512 KiB
// from memory instead costs it half of what a gather saves (docs/experiments.md).
constexpr size_t kPastCaches = size_t{512} << 10;

const void* source_of(const Step& copy) { return reinterpret_cast<const void*>(copy.source); }

ReadNext read_by(const Step& copy) { return {source_of(copy), copy.bytes}; }

// Copies [first, last), all within this process, for whoever reads it soon.
void copy_own(const Step* first, const Step* last) {
  for (; first != last; ++first) std::memcpy(first->destination, source_of(*first), first->bytes);
}

// The same past the caches.
void copy_own(const Step* first, const Step* last, ReadNext next) {
  for (; first != last; ++first) {
    copy_past_caches(first->destination, source_of(*first), first->bytes, next);
  }
}

// Copies [first, last), all from one peer, in as few system calls as it takes.
void copy_peers(const Step* first, const Step* last) {
  const auto process = static_cast<pid_t>(first->space);
  std::array<iovec, kMostPieces> local;
  std::array<iovec, kMostPieces> remote;
  while (first != last) {
    size_t count = 0;
    size_t total = 0;
    for (; first + count != last && count < kMostPieces; ++count) {
      const Step& step = first[count];
      if (count > 0 && total + step.bytes > kMostAtOnce) break;
      local[count] = {step.destination, step.bytes};
      remote[count] = {reinterpret_cast<void*>(step.source), step.bytes};
      total += step.bytes;
    }
    const ssize_t moved =
        count == 1 ? -1 : process_vm_readv(process, local.data(), count, remote.data(), count, 0);
    // A short or refused transfer is finished, or refused with the reason, piece by piece.
    if (moved != static_cast<ssize_t>(total)) {
      for (size_t i = 0; i < count; ++i) {
        read_from(process, first[i].destination, first[i].source, first[i].bytes);
      }
    }
    first += count;
  }
}

class HostQueue final : public Queue {
 public:
  HostQueue(const void* page, size_t bytes)
      : page_(static_cast<const char*>(page)), end_(page_ + bytes) {}

  void follow_caller() override {}
  void use_callers_stream() override {}
  void caller_follows() override {}
  void follow(void*) override {}

  void run(const Program& program, Waiter& waiter) override {
    size_t bytes = 0;
    for (const Step& step : program) bytes += shared(step.destination) ? 0 : step.bytes;
    const Step* const end = program.data() + program.size();
    const Step* to_page = program.data();
    for (size_t i = 0; i < program.size();) {
      const Step& step = program[i];
      size_t next = i + 1;
      switch (step.kind) {
        case Step::Kind::kWait:
          waiter.wait(*step.counter, step.value);
          break;
        case Step::Kind::kWrite:
          step.counter->store(step.value);
          waiter.wrote();
          break;
        case Step::Kind::kCopy:
          while (next < program.size() && program[next].kind == Step::Kind::kCopy &&
                 program[next].space == step.space &&
                 shared(program[next].destination) == shared(step.destination)) {
            ++next;
          }
          if (step.space != 0) {
            copy_peers(&step, program.data() + next);
          } else if (bytes < kPastCaches || shared(step.destination)) {
            // What goes to the page is read by a peer next.
            copy_own(&step, program.data() + next);
          } else {
            const Step* const after = program.data() + next;
            if (to_page < after) {
              to_page = std::find_if(after, end, [this](const Step& later) {
                return later.kind == Step::Kind::kCopy && shared(later.destination);
              });
            }
            copy_own(&step, after, to_page == end ? ReadNext() : read_by(*to_page));
          }
          break;
        case Step::Kind::kLaunch:
          step.launch->call();
          break;
        case Step::Kind::kFork:
        case Step::Kind::kMark:
        case Step::Kind::kJoin:
          break;  // launches run in their place
      }
      i = next;
    }
  }

  std::shared_ptr<Marker> mark() override {
    class Passed final : public Marker {
      bool passed() override { return true; }
      void caller_follows() override {}
    };
    return std::make_shared<Passed>();
  }
  std::shared_ptr<Marker> mark_caller() override { return mark(); }

 private:
  bool shared(const void* destination) const { return page_ <= destination && destination < end_; }

  const char* const page_;
  const char* const end_;
};

class HostEngine final : public Engine {
 public:
  std::string name() const override { return "host"; }
  bool stream_ordered() const override { return false; }
  bool opens_exports() const override { return false; }
  size_t wave_bytes() const override { return kWave; }

  // The whole address space is one export: nothing to register, nothing to open, nothing to retire.
  Place publish(const void* data, size_t) override {
    return {0, reinterpret_cast<uintptr_t>(data)};
  }
  void check_readable(const void* data) const override {
    char byte;
    const iovec local{&byte, 1};
    const iovec remote{const_cast<void*>(data), 1};
    // The kernel reads the own memory as it would read a peer's: not where it has no pages to pin.
    const ssize_t moved = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (moved < 0 && errno == EFAULT) {
      throw CannotShare("memory that other processes cannot read");
    }
  }
  Ticket ticket(uint64_t) override { return {}; }
  Mapping open(const std::string& identity, const Ticket&) override {
    return {std::stoull(identity), 0, UINTPTR_MAX};
  }
  void close(const Mapping&) override {}
  std::string identity() const override { return std::to_string(getpid()); }
  Link link_to(const std::string&) const override { return Link::kHostMemory; }
  std::unique_ptr<Queue> queue(void* page, size_t bytes) override {
    return std::make_unique<HostQueue>(page, bytes);
  }
};

}  // namespace

std::shared_ptr<Engine> host_engine() { return std::make_shared<HostEngine>(); }

void let_peers_read() {
  // Only where Yama allows it to a parent alone, or nobody can tell: 0 allows it anyway, 2 and 3 do
  // not listen.
  std::ifstream yama("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  if (!(yama >> scope) || scope == 1) prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

}  // namespace pg_sdma
