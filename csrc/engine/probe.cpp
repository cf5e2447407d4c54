#include "engine/probe.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <thread>

#include "engine/stream_queue.h"

namespace pg_sdma {
namespace {

using Clock = std::chrono::steady_clock;

// An event passes in microseconds. This long also covers a device that is busy with other work.
constexpr std::chrono::seconds kPatience{2};

// A counter on a page of its own, for as long as the probe needs it.
class ProbePage {
 public:
  ProbePage() : bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    page_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~ProbePage() { munmap(page_, bytes_); }
  ProbePage(const ProbePage&) = delete;
  ProbePage& operator=(const ProbePage&) = delete;

  Counter& counter() { return *static_cast<Counter*>(page_); }
  void* data() const { return page_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* page_;
};

bool passes(Queue::Marker& marker) {
  for (const auto end = Clock::now() + kPatience; Clock::now() < end;) {
    if (marker.passed()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return false;
}

class NoWaiter final : public Waiter {
  void wait(Counter&, uint64_t) override {}
  void wrote() override {}
};

}  // namespace

void probe_streams(const DriverDevice& device) {
  const auto shared = std::make_shared<DriverDevice>(device);
  NoWaiter waiter;
  ProbePage page;
  ProbePage other_page;
  StreamQueue waiting(shared, page.data(), page.bytes());
  StreamQueue free(shared, other_page.data(), other_page.bytes());
  struct Release {
    Counter& counter;
    ~Release() { counter = 1; }
  } release{page.counter()};
  waiting.run({Step::wait(page.counter(), 1)}, waiter);
  const auto held = waiting.mark();
  free.run({Step::write(other_page.counter(), 1)}, waiter);
  const bool independent = passes(*free.mark()) && other_page.counter() == 1;
  const bool waited = !held->passed();
  page.counter() = 1;
  const bool released = passes(*held);
  if (!independent) throw CannotShare("a stream that waits holds up the others");
  if (!waited || !released) throw CannotShare("streams do not wait for counters in host memory");
}

}  // namespace pg_sdma
