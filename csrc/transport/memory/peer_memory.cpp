#include "transport/memory/peer_memory.h"

#include <unistd.h>

#include <algorithm>

#include "engine/inject.h"

namespace pg_sdma {
namespace {

// How often freed memory is looked for, and how many exports the driver is asked about then: some
// tens of microseconds' worth.
constexpr std::chrono::milliseconds kTick{5};
constexpr size_t kMostQuestions = 64;
// After a look that failed: a driver that has ended fails for ever.
constexpr std::chrono::milliseconds kTickAfterFailure{200};

}  // namespace

PeerMemory::PeerMemory(int rank, std::shared_ptr<Engine> engine, ControlPage& page,
                       std::vector<std::string> identities)
    : rank_(rank),
      engine_(std::move(engine)),
      page_(page),
      identities_(std::move(identities)),
      process_(getpid()),
      closing_(engine_->opens_exports() ? Closing::of(engine_) : nullptr),
      withdrawn_(identities_.size()) {
  if (closing_) {
    closing_->join(this, {[this] { return idle(); }, [this] { give_imports(); }});
  }
}

PeerMemory::~PeerMemory() {
  if (getpid() != process_) {
    if (thread_.joinable()) thread_.detach();  // after a fork it is the parent's
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (!closing_) return;
  closing_->leave(this);
  for (const auto& [export_id, posted] : posted_) {
    page_.withdraw_ticket(rank_, export_id);
    engine_->give_up(export_id);
  }
  if (kept_open_ || page_.done(rank_) < last_direct_) return;
  std::vector<Mapping> open;
  for (const auto& [key, import] : imports_) open.push_back(import.mapping);
  closing_->later(open);
  closing_->look();
}

Place PeerMemory::publish(const void* data, size_t bytes, uint64_t number) {
  inject::at("export");
  const Place place = engine_->publish(data, bytes);
  if (!closing_) return place;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (published_for_ != number) published_.clear();
    published_for_ = number;
    published_.push_back(place.export_id);
    if (posted_.count(place.export_id) > 0) return place;
  }
  const Ticket ticket = engine_->ticket(place.export_id);
  const uintptr_t first = reinterpret_cast<uintptr_t>(data) - place.offset;
  // A new export often lies where an old one was, and some drivers map the one only after the
  // other is unmapped: so the old ticket goes first.
  withdraw_tickets_between(first, first + ticket.bytes);
  add_ticket(ticket, first);
  return place;
}

void PeerMemory::add_ticket(const Ticket& ticket, uintptr_t first) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto replace = [this](uint64_t other) {
    const auto found = posted_.find(other);
    if (found != posted_.end() && needed(other, found->second)) return false;
    if (found != posted_.end()) forget(found);
    return true;
  };
  if (!page_.post_ticket(rank_, ticket, replace)) {
    engine_->give_up(ticket.export_id);
    throw CannotShare("more exports than late ranks can be told of at a time");
  }
  posted_[ticket.export_id] = {first, first + ticket.bytes, 0};
  posted_at_.emplace(first, ticket.export_id);
  longest_posted_ = std::max<uintptr_t>(longest_posted_, ticket.bytes);
  start_thread();
}

void PeerMemory::keep_tickets(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (published_for_ != number) return;  // it has shared nothing
  for (const uint64_t export_id : published_) {
    const auto found = posted_.find(export_id);
    if (found != posted_.end()) found->second.kept_for = number;
  }
}

bool PeerMemory::needed(uint64_t export_id, const Posted& posted) const {
  const auto current = std::find(published_.begin(), published_.end(), export_id);
  if (current != published_.end() && published_for_ > settled_) return true;
  for (size_t rank = 0; rank < identities_.size(); ++rank) {
    if (page_.done(static_cast<int>(rank)) < posted.kept_for) return true;
  }
  return false;
}

Mapping PeerMemory::open(int peer, uint64_t export_id, uint64_t number,
                         std::chrono::milliseconds retry) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = imports_.find({peer, export_id});
    if (known != imports_.end()) {
      known->second.last_use = number;
      return known->second.mapping;
    }
  }
  std::chrono::milliseconds pause{1};
  Clock::time_point until{};
  for (;; pause *= 2) {
    try {
      return open_once(peer, export_id, number);
    } catch (const CannotShare&) {
      const auto now = Clock::now();
      if (until == Clock::time_point{}) until = now + retry;
      if (!closing_ || now + pause > until) throw;
    }
    // Descriptors may be short for a moment, the peer busy; or the old mapping of memory that was
    // freed and allocated again may be in the way, also another group's.
    closing_->look_everywhere();
    std::this_thread::sleep_for(pause);
  }
}

Mapping PeerMemory::open_once(int peer, uint64_t export_id, uint64_t number) {
  Ticket ticket;
  if (closing_) {
    if (!page_.find_ticket(peer, export_id, ticket)) {
      throw CannotShare("an export whose ticket was replaced");
    }
    give_imports();
    closing_->look();
  }
  inject::at("import");
  const Mapping mapping = engine_->open(identities_[peer], ticket);
  std::lock_guard<std::mutex> lock(mutex_);
  imports_[{peer, export_id}] = {mapping, number};
  start_thread();
  return mapping;
}

void PeerMemory::begin(uint64_t number) {
  if (closing_) closing_->enqueue([&] { begun_ = number; });
}

void PeerMemory::settle(uint64_t number, bool direct) {
  std::lock_guard<std::mutex> lock(mutex_);
  settled_ = number;
  if (direct) last_direct_ = number;
}

void PeerMemory::keep_open() {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_open_ = true;
}

// Of a group that is broken nothing is waited for any more.
bool PeerMemory::idle() const {
  if (page_.faulted()) return true;
  for (size_t rank = 0; rank < identities_.size(); ++rank) {
    if (page_.done(static_cast<int>(rank)) < begun_) return false;
  }
  return true;
}

void PeerMemory::withdraw_tickets_between(uintptr_t first, uintptr_t end) {
  std::vector<uint64_t> exports;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uintptr_t from = first > longest_posted_ ? first - longest_posted_ : 0;
    for (auto it = posted_at_.lower_bound(from); it != posted_at_.end() && it->first < end; ++it) {
      if (posted_.at(it->second).end > first) exports.push_back(it->second);
    }
  }
  withdraw_where_gone(exports);
}

void PeerMemory::withdraw_some_tickets() {
  std::vector<uint64_t> exports;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = posted_.lower_bound(next_looked_at_);
    for (size_t i = 0; i < std::min(kMostQuestions, posted_.size()); ++i, ++it) {
      if (it == posted_.end()) it = posted_.begin();
      exports.push_back(it->first);
    }
    if (!exports.empty()) next_looked_at_ = exports.back() + 1;
  }
  withdraw_where_gone(exports);
}

void PeerMemory::withdraw_where_gone(const std::vector<uint64_t>& exports) {
  const auto unneeded = [this](uint64_t export_id) {
    const auto found = posted_.find(export_id);
    return found != posted_.end() && !needed(export_id, found->second) ? found : posted_.end();
  };
  for (const uint64_t export_id : exports) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (unneeded(export_id) == posted_.end()) continue;
    }
    if (engine_->live(export_id)) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = unneeded(export_id);
    if (found == posted_.end()) continue;  // by now: an operation uses a part that is still there
    page_.withdraw_ticket(rank_, export_id);
    forget(found);
  }
}

PeerMemory::PostedById::iterator PeerMemory::forget(PostedById::iterator posted) {
  const auto [first, last] = posted_at_.equal_range(posted->second.first);
  const auto at =
      std::find_if(first, last, [&](const auto& entry) { return entry.second == posted->first; });
  if (at != last) posted_at_.erase(at);
  engine_->give_up(posted->first);
  return posted_.erase(posted);
}

void PeerMemory::give_imports() {
  std::vector<Mapping> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kept_open_) return;
    std::vector<uint64_t> withdrawn(withdrawn_.size());
    for (size_t rank = 0; rank < withdrawn.size(); ++rank) {
      withdrawn[rank] = page_.tickets_withdrawn(static_cast<int>(rank));
    }
    if (withdrawn == withdrawn_ && !some_in_use_) return;
    withdrawn_ = withdrawn;
    some_in_use_ = false;
    const uint64_t done = page_.done(rank_);
    for (auto it = imports_.begin(); it != imports_.end();) {
      const auto& [peer, export_id] = it->first;
      const Import& import = it->second;
      Ticket ticket;
      if (page_.find_ticket(peer, export_id, ticket)) {
        ++it;
        continue;
      }
      // An operation that went elsewhere is never done: then the direct one before it counts.
      const bool over =
          import.last_use <= settled_ && done >= std::min(import.last_use, last_direct_);
      some_in_use_ = some_in_use_ || !over;
      if (over) unused.push_back(import.mapping);
      it = over ? imports_.erase(it) : std::next(it);
    }
  }
  if (!unused.empty()) closing_->later(unused);
}

void PeerMemory::start_thread() {
  if (thread_.joinable() || !closing_) return;
  thread_ = std::thread([this] { look_often(); });
}

void PeerMemory::look_often() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto tick = kTick;
  while (!stop_.wait_for(lock, tick, [this] { return stopping_; })) {
    lock.unlock();
    try {
      tick = kTick;
      withdraw_some_tickets();
      give_imports();
      closing_->look();
    } catch (const std::exception&) {
      tick = kTickAfterFailure;  // what it was about to look at has its turn again later
    }
    lock.lock();
  }
}

}  // namespace pg_sdma
