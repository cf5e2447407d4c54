#include "transport/sharing.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "engine/inject.h"

namespace pg_sdma {
namespace {

constexpr std::chrono::milliseconds kTick{200};

}  // namespace

Sharing::Sharing(int rank, std::shared_ptr<Engine> engine, ControlPage& page,
                 std::vector<std::string> identities)
    : rank_(rank),
      engine_(std::move(engine)),
      page_(page),
      identities_(std::move(identities)),
      process_(getpid()) {}

Sharing::~Sharing() {
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
  for (const auto& [export_id, last] : posted_) page_.withdraw_ticket(rank_, export_id);
  if (kept_open_ || page_.done(rank_) < last_direct_) return;
  for (const auto& [key, import] : imports_) engine_->close(import.mapping);
}

Place Sharing::publish(const void* data, size_t bytes, uint64_t number) {
  inject::at("export");
  const Place place = engine_->publish(data, bytes);
  if (!engine_->opens_exports()) return place;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (published_for_ != number) published_.clear();
    published_for_ = number;
    published_.push_back(place.export_id);
  }
  Ticket posted;
  if (page_.find_ticket(rank_, place.export_id, posted)) return place;
  // A new export often lies where an old one was, and some drivers map the one only after the
  // other is unmapped: so the old ticket goes first. Once an operation: what it shares is all
  // allocated, and asking the driver about every ticket for each new one would take longer than
  // peers are patient.
  if (withdrawn_for_ != number) withdraw_tickets();
  withdrawn_for_ = number;
  const auto may_replace = [this](uint64_t other) {
    std::lock_guard<std::mutex> lock(mutex_);
    return !needed(other);
  };
  if (!page_.post_ticket(rank_, engine_->ticket(place.export_id), may_replace)) {
    throw CannotShare("more exports than late ranks can be told of at a time");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  posted_.emplace(place.export_id, 0);
  start_thread();
  return place;
}

void Sharing::keep_tickets(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (published_for_ != number) return;  // it has shared nothing
  for (const uint64_t export_id : published_) {
    if (const auto found = posted_.find(export_id); found != posted_.end()) found->second = number;
  }
}

bool Sharing::needed(uint64_t export_id) const {
  const auto current = std::find(published_.begin(), published_.end(), export_id);
  if (current != published_.end() && published_for_ > settled_) return true;
  const auto found = posted_.find(export_id);
  if (found == posted_.end()) return false;
  for (size_t rank = 0; rank < identities_.size(); ++rank) {
    if (page_.done(static_cast<int>(rank)) < found->second) return true;
  }
  return false;
}

Mapping Sharing::open(int peer, uint64_t export_id, uint64_t number) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = imports_.find({peer, export_id});
    if (known != imports_.end()) {
      known->second.last_use = number;
      return known->second.mapping;
    }
  }
  Ticket ticket;
  if (engine_->opens_exports()) {
    if (!page_.find_ticket(peer, export_id, ticket)) {
      throw CannotShare("an export whose ticket was replaced");
    }
    close_imports();
  }
  inject::at("import");
  const Mapping mapping = engine_->open(identities_[peer], ticket);
  std::lock_guard<std::mutex> lock(mutex_);
  imports_[{peer, export_id}] = {mapping, number};
  start_thread();
  return mapping;
}

void Sharing::settle(uint64_t number, bool direct) {
  std::lock_guard<std::mutex> lock(mutex_);
  settled_ = number;
  if (direct) last_direct_ = number;
}

void Sharing::keep_open() {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_open_ = true;
}

void Sharing::withdraw_tickets() {
  std::vector<uint64_t> posted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [export_id, last] : posted_) {
      if (!needed(export_id)) posted.push_back(export_id);
    }
  }
  for (const uint64_t export_id : posted) {
    if (engine_->live(export_id)) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    if (needed(export_id)) continue;  // by now: an operation uses a part that is still there
    page_.withdraw_ticket(rank_, export_id);
    posted_.erase(export_id);
  }
}

void Sharing::close_imports() {
  std::vector<Mapping> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kept_open_) return;
    const uint64_t done = page_.done(rank_);
    for (auto it = imports_.begin(); it != imports_.end();) {
      const auto& [peer, export_id] = it->first;
      const Import& import = it->second;
      Ticket ticket;
      // An operation that went elsewhere is never done: then the direct one before it counts.
      const bool over =
          import.last_use <= settled_ && done >= std::min(import.last_use, last_direct_);
      if (over && !page_.find_ticket(peer, export_id, ticket)) {
        unused.push_back(import.mapping);
        it = imports_.erase(it);
      } else {
        ++it;
      }
    }
  }
  // Outside of the lock: a driver may take its time over it.
  for (const Mapping& mapping : unused) engine_->close(mapping);
}

void Sharing::start_thread() {
  if (thread_.joinable() || !engine_->opens_exports()) return;
  thread_ = std::thread([this] { look_now_and_then(); });
}

void Sharing::look_now_and_then() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_.wait_for(lock, kTick, [this] { return stopping_; })) {
    lock.unlock();
    try {
      withdraw_tickets();
      close_imports();
    } catch (const std::exception&) {
      return;  // a driver that has failed or ended: nothing is left to give back
    }
    lock.lock();
  }
}

}  // namespace pg_sdma
