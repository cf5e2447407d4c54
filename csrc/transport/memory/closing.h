// When peers' memory is closed that this process has done with: at a moment when nothing of its
// groups waits on the device.
//
// A driver may hold the closing of an IPC handle until every stream of the process has gone on, and
// with it what other threads ask of it (on driver 580 the making of events). A stream that waits
// for a peer goes on when that peer's host does, which may be held up in the same way.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/engine.h"

namespace pg_sdma {

class Closing {
 public:
  // The one of all groups of `engine`.
  static std::shared_ptr<Closing> of(const std::shared_ptr<Engine>& engine);

  explicit Closing(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  Closing(const Closing&) = delete;
  Closing& operator=(const Closing&) = delete;
  // Whoever was a member has left: nothing waits any more.
  ~Closing();

  // A group: whether all is over that it has enqueued, and how it hands over here what it does not
  // need any more. Either is called from any thread, and neither calls back but for later().
  struct Member {
    std::function<bool()> idle;
    std::function<void()> give;
  };
  void join(const void* who, Member member);
  void leave(const void* who);

  // A member is about to enqueue what may wait for peers: `note` says so in what its idle() tells.
  // Where memory has had to stay open for long because something always waited, this waits for a
  // moment in which nothing does, a tenth of a second at most.
  void enqueue(const std::function<void()>& note);

  // Closes them now or at a later look().
  void later(const std::vector<Mapping>& mappings);
  void look();
  // Asks every member for what it does not need, and looks.
  void look_everywhere();

 private:
  using Clock = std::chrono::steady_clock;
  bool idle() const;
  bool try_to_close();

  const std::shared_ptr<Engine> engine_;
  // Held while a member notes that it enqueues, and while memory is closed.
  std::mutex gate_;
  std::mutex mutex_;  // taken inside of gate_; guards what follows
  std::map<const void*, Member> members_;
  std::vector<Mapping> unused_;
  Clock::time_point make_room_at_{};  // where unused_ is not empty
  std::chrono::milliseconds patience_{};
};

}  // namespace pg_sdma
