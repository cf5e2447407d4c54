#include "transport/memory/closing.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace pg_sdma {
namespace {

// How long unused memory stays open before an operation waits for a moment to close it in; twice as
// long after each one that waited in vain.
constexpr std::chrono::milliseconds kFirstPatience{1000};
constexpr std::chrono::milliseconds kLongestPatience{60000};
constexpr std::chrono::milliseconds kLongestWait{100};
constexpr std::chrono::microseconds kPause{100};

}  // namespace

std::shared_ptr<Closing> Closing::of(const std::shared_ptr<Engine>& engine) {
  // Never destroyed: threads may be here while the process ends.
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<const Engine*, std::weak_ptr<Closing>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = known[engine.get()];
  if (std::shared_ptr<Closing> closing = found.lock()) return closing;
  auto made = std::make_shared<Closing>(engine);
  found = made;
  return made;
}

Closing::~Closing() {
  for (const Mapping& mapping : unused_) engine_->close(mapping);
}

void Closing::join(const void* who, Member member) {
  std::lock_guard<std::mutex> lock(mutex_);
  members_.emplace(who, std::move(member));
}

void Closing::leave(const void* who) {
  std::lock_guard<std::mutex> gate(gate_);  // nobody asks it any more once this returns
  std::lock_guard<std::mutex> lock(mutex_);
  members_.erase(who);
}

bool Closing::idle() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const auto& member) { return member.second.idle(); });
}

void Closing::later(const std::vector<Mapping>& mappings) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (unused_.empty()) {
    patience_ = kFirstPatience;
    make_room_at_ = Clock::now() + patience_;
  }
  unused_.insert(unused_.end(), mappings.begin(), mappings.end());
}

void Closing::look() {
  std::lock_guard<std::mutex> gate(gate_);
  try_to_close();
}

// With the gate held. Whether nothing is left to close.
bool Closing::try_to_close() {
  std::vector<Mapping> now;
  bool all = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (unused_.empty()) return true;
    all = idle();
    const auto later = std::partition(unused_.begin(), unused_.end(), [&](const Mapping& mapping) {
      return all || !engine_->closing_waits(mapping);
    });
    now.assign(unused_.begin(), later);
    unused_.erase(unused_.begin(), later);
    all = unused_.empty();
  }
  for (const Mapping& mapping : now) engine_->close(mapping);
  return all;
}

void Closing::look_everywhere() {
  std::lock_guard<std::mutex> gate(gate_);
  std::vector<std::function<void()>> gives;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [who, member] : members_) gives.push_back(member.give);
  }
  for (const auto& give : gives) give();
  try_to_close();
}

void Closing::enqueue(const std::function<void()>& note) {
  std::unique_lock<std::mutex> gate(gate_);
  const auto starved = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return !unused_.empty() && Clock::now() >= make_room_at_;
  };
  if (starved()) {
    const auto until = Clock::now() + kLongestWait;
    while (!try_to_close() && Clock::now() < until) {
      gate.unlock();  // members of other threads may go on: each of them waits by itself
      std::this_thread::sleep_for(kPause);
      gate.lock();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    patience_ = std::min(2 * patience_, kLongestPatience);
    make_room_at_ = Clock::now() + patience_;
  }
  note();
}

}  // namespace pg_sdma
