#include "transport/health/watchdog.h"

#include <sstream>
#include <utility>

#include "transport/health/progress.h"

namespace pg_sdma {
namespace {

constexpr std::chrono::milliseconds kLook{100};

}  // namespace

Watchdog::Watchdog(ControlPage& page, const Peers& peers, std::string group, int rank, int world,
                   std::function<void(const std::string&)> end)
    : page_(page),
      peers_(peers),
      group_(std::move(group)),
      rank_(rank),
      world_(world),
      end_(std::move(end)),
      thread_([this] { serve(); }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Watchdog::watch(uint64_t number, std::string operation, uint64_t bytes,
                     Clock::time_point deadline, const char* what) {
  std::lock_guard<std::mutex> lock(mutex_);
  outstanding_.push_back({number, std::move(operation), bytes, Clock::now(), deadline, what});
}

bool Watchdog::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return outstanding_.empty() || finished(outstanding_.back());
}

void Watchdog::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!wake_.wait_for(lock, kLook, [this] { return stopping_; })) {
    while (!outstanding_.empty() && finished(outstanding_.front())) outstanding_.pop_front();
    if (outstanding_.empty()) continue;
    const std::string what = trouble(outstanding_.front());
    if (what.empty()) continue;
    lock.unlock();
    page_.set_fault(rank_, what);
    end_(what);
    return;
  }
}

bool Watchdog::finished(const Operation& operation) const {
  for (int rank = 0; rank < world_; ++rank) {
    if (page_.done(rank) < operation.number) return false;
  }
  return true;
}

std::string Watchdog::trouble(const Operation& operation) const {
  if (page_.faulted()) return page_.fault();
  std::string what;
  for (int rank = 0; rank < world_ && what.empty(); ++rank) {
    if (rank == rank_ || page_.done(rank) >= operation.number) continue;
    // What a rank has enqueued before it departed runs for as long as its process lives.
    const bool left = page_.departed(rank) && page_.consumed(rank) < operation.number;
    if (!left && !peers_.gone(rank)) continue;
    if (page_.done(rank) >= operation.number) continue;  // it was done first
    what = left ? "rank " + std::to_string(rank) +
                      " has destroyed the group or is exiting (look at its output)"
                : "the process of rank " + std::to_string(rank) +
                      " has ended (look at its output for the cause)";
  }
  if (what.empty() && Clock::now() >= operation.deadline) what = "it timed out";
  if (what.empty()) return "";
  std::ostringstream text;
  text << "rank " << rank_ << ": " << operation.name << " (operation " << operation.number
       << " of group " << group_ << ", " << operation.bytes << " bytes of " << operation.what
       << ") cannot complete: " << what << ". "
       << tell_progress(read_progress(page_, peers_, world_), operation.number,
                        /*stream_ordered=*/true, Clock::now() - operation.start);
  return text.str();
}

}  // namespace pg_sdma
