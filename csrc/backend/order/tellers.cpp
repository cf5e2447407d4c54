#include "backend/order/tellers.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace pg_sdma {
namespace {

using Clock = std::chrono::steady_clock;

// How long a callback keeps the next of its level waiting. Long beside what Python's lock makes a
// short callback wait: what overtakes it need not come in the same order on every rank.
constexpr std::chrono::milliseconds kTurn{100};

thread_local bool own_thread = false;

}  // namespace

bool on_own_thread() { return own_thread; }
void be_own_thread() { own_thread = true; }

struct Tellers::State {
  struct Teller {
    std::thread thread;
    bool telling = false;
    int level = 0;  // of what it tells
  };
  struct Waiting {
    int level;
    std::function<void()> task;
  };
  struct Turn {
    const Teller* teller;
    Clock::time_point ends;
  };

  // All but serve() with the mutex held.
  static void serve(const std::shared_ptr<State>& state, const std::shared_ptr<Teller>& me);
  bool begins(const Waiting& waiting) const {
    const auto turn = turns.find(waiting.level);
    return turn == turns.end() || turn->second.ends <= Clock::now();
  }
  void give_up_turn(const Teller& teller) {
    const auto turn = turns.find(teller.level);
    if (turn != turns.end() && turn->second.teller == &teller) turns.erase(turn);
    changed.notify_all();
  }
  // Who waits must not need one that is busy.
  static void keep_one_free(const std::shared_ptr<State>& state);

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Teller>> tellers;
  std::deque<Waiting> waiting;
  std::map<int, Turn> turns;  // by level
  bool stopping = false;

  // Where the calling thread is a teller.
  static thread_local State* own_state;
  static thread_local Teller* own_teller;
};

thread_local Tellers::State* Tellers::State::own_state = nullptr;
thread_local Tellers::State::Teller* Tellers::State::own_teller = nullptr;

Tellers::Tellers() : state_(std::make_shared<State>()) {}

Tellers::~Tellers() { stop(std::chrono::milliseconds(0)); }

int Tellers::level() { return State::own_teller != nullptr ? State::own_teller->level + 1 : 0; }

void Tellers::step_aside() {
  if (State::own_teller == nullptr) return;
  std::lock_guard<std::mutex> lock(State::own_state->mutex);
  State::own_state->give_up_turn(*State::own_teller);
}

void Tellers::run(int level, std::function<void()> task) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  try {
    State::keep_one_free(state_);
  } catch (const std::system_error&) {
    if (state_->tellers.empty()) {
      lock.unlock();
      task();  // better than not at all
      return;
    }
  }
  state_->waiting.push_back({level, std::move(task)});
  state_->changed.notify_all();
}

void Tellers::State::keep_one_free(const std::shared_ptr<State>& state) {
  const auto& tellers = state->tellers;
  if (!std::all_of(tellers.begin(), tellers.end(), [](auto& each) { return each->telling; })) {
    return;
  }
  auto teller = std::make_shared<Teller>();
  teller->thread = std::thread([state, teller] { serve(state, teller); });
  if (state->stopping) {
    teller->thread.detach();  // nobody is left to join it
  } else {
    state->tellers.push_back(std::move(teller));
  }
}

void Tellers::State::serve(const std::shared_ptr<State>& state, const std::shared_ptr<Teller>& me) {
  be_own_thread();
  own_state = state.get();
  own_teller = me.get();
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    auto& waiting = state->waiting;
    const auto next = std::find_if(waiting.begin(), waiting.end(),
                                   [&](const Waiting& each) { return state->begins(each); });
    if (next != waiting.end()) {
      Waiting taken = std::move(*next);
      waiting.erase(next);
      me->telling = true;
      me->level = taken.level;
      state->turns[taken.level] = {me.get(), Clock::now() + kTurn};
      if (!waiting.empty()) {
        try {
          keep_one_free(state);
        } catch (const std::system_error&) {
          // Then who waits, waits for this one.
        }
      }
      lock.unlock();
      taken.task();
      taken.task = nullptr;
      lock.lock();
      me->telling = false;
      state->give_up_turn(*me);
    } else if (!waiting.empty()) {
      Clock::time_point soonest = Clock::time_point::max();
      for (const Waiting& each : waiting) {
        soonest = std::min(soonest, state->turns.at(each.level).ends);
      }
      state->changed.wait_until(lock, soonest);
    } else if (state->stopping) {
      return;
    } else {
      state->changed.wait(lock);
    }
  }
}

void Tellers::stop(std::chrono::milliseconds grace) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const auto done = [this](auto& each) {
    return !each->telling || each.get() == State::own_teller;
  };
  state_->changed.wait_for(lock, grace, [&] {
    const auto& tellers = state_->tellers;
    return state_->waiting.empty() && std::all_of(tellers.begin(), tellers.end(), done);
  });
  const bool all_taken = state_->waiting.empty();
  for (const auto& teller : std::exchange(state_->tellers, {})) {
    if (teller->telling || !all_taken) {
      teller->thread.detach();
      continue;
    }
    lock.unlock();
    teller->thread.join();
    lock.lock();
  }
}

}  // namespace pg_sdma
