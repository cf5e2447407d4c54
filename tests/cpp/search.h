// Walks through every state that a group of a few ranks can get into, or finds a shortest way to a
// violation. `Group` has:
//   State, trivially copyable, with `ranks`; State initial(bounds); bool finished(state, bounds);
//   Effect apply(state, bounds, move, log)
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "agree_terms.h"

namespace explore {

// 128 bits of a state's bytes: two different states of 10^8 get the same with odds of 10^-23.
struct Key {
  uint64_t low = 0;
  uint64_t high = 0;
};

template <class State>
Key key_of(State state) {
  static_assert(sizeof(State) % 8 == 0);
  __builtin_clear_padding(&state);
  Key key{0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f};
  const auto* bytes = reinterpret_cast<const unsigned char*>(&state);
  for (size_t i = 0; i < sizeof(State); i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    key.low = (key.low ^ word) * 0xff51afd7ed558ccd;
    key.low ^= key.low >> 32;
    key.high = (key.high ^ word) * 0xc4ceb9fe1a85ec53;
    key.high ^= key.high >> 29;
  }
  return key;
}

// The states seen, and which of them lie on the path from the start to the current one.
class Seen {
 public:
  enum class Is { kNew, kOnPath, kKnown };

  Is enter(Key key) {
    if (2 * ++count_ > slots_.size()) grow();
    Key& slot = find(slots_, key);
    if (slot.low != 0) {
      --count_;
      return (slot.low & kPath) != 0 ? Is::kOnPath : Is::kKnown;
    }
    slot = {key.low | kUsed | kPath, key.high};
    return Is::kNew;
  }
  void leave(Key key) { find(slots_, key).low &= ~kPath; }
  size_t count() const { return count_; }

 private:
  // Two bits of the key serve as marks.
  static constexpr uint64_t kUsed = 1;
  static constexpr uint64_t kPath = 2;

  static Key& find(std::vector<Key>& slots, Key key) {
    const size_t mask = slots.size() - 1;
    for (size_t i = key.high & mask;; i = (i + 1) & mask) {
      Key& slot = slots[i];
      if (slot.low == 0 ||
          (((slot.low ^ key.low) & ~(kUsed | kPath)) == 0 && slot.high == key.high)) {
        return slot;
      }
    }
  }

  void grow() {
    std::vector<Key> larger(slots_.size() * 2);
    for (const Key& key : slots_) {
      if (key.low != 0) find(larger, key) = key;
    }
    slots_ = std::move(larger);
  }

  std::vector<Key> slots_ = std::vector<Key>(1 << 16);
  size_t count_ = 0;
};

template <class Group>
class Search {
 public:
  using State = typename Group::State;

  explicit Search(const Bounds& bounds) : bounds_(bounds) {}

  // Visits all states. False when there is a violation.
  bool visit_all() { return visit(Group::initial(bounds_), 0); }

  void print_counts() const {
    std::printf("%zu states, %zu moves, at most %d moves deep\n", seen_.count(), moves_, deepest_);
  }

  // Breadth first, because the shortest way to a violation is the one to read.
  void print_shortest() const {
    struct Node {
      size_t from;
      Move move;
    };
    std::vector<Node> nodes{{0, {}}};
    std::deque<State> frontier{Group::initial(bounds_)};
    Seen seen;
    seen.enter(key_of(frontier.front()));
    for (size_t at = 0; !frontier.empty(); ++at, frontier.pop_front()) {
      bool stuck = !Group::finished(frontier.front(), bounds_);
      const char* violation = nullptr;
      each_move(frontier.front(), [&](const Move& move, const Effect& effect, const State& next) {
        violation = effect.violation;
        stuck &= !effect.moved || move.give_up;
        if (!effect.moved && !violation) return true;
        if (!violation && seen.enter(key_of(next)) != Seen::Is::kNew) return true;
        nodes.push_back({at, move});
        frontier.push_back(next);
        return violation == nullptr;
      });
      if (!violation && !stuck) continue;
      std::vector<Move> path;
      for (size_t i = violation ? nodes.size() - 1 : at; i != 0; i = nodes[i].from) {
        path.insert(path.begin(), nodes[i].move);
      }
      print(path, violation ? violation : kStuck);
      return;
    }
    // Only circles show themselves to the depth-first search alone.
    print(path_, kCircle);
  }

 private:
  static constexpr const char* kStuck = "nobody can go on";
  static constexpr const char* kCircle = "a rank goes in circles";

  // Calls use(move, effect, next state) for each move of each rank while it says to go on.
  template <class Use>
  bool each_move(const State& state, Use use) const {
    for (uint8_t rank = 0; rank < state.ranks.size(); ++rank) {
      int choices = 1;
      bool blocked = false;
      for (uint8_t choice = 0; choice < choices; ++choice) {
        const Move move{rank, false, choice};
        State next = state;
        const Effect effect = Group::apply(next, bounds_, move);
        choices = effect.choices;
        blocked = effect.blocked;
        if (!use(move, effect, next)) return false;
      }
      if (!blocked) continue;
      const Move move{rank, true, 0};
      State next = state;
      const Effect effect = Group::apply(next, bounds_, move);
      if (!use(move, effect, next)) return false;
    }
    return true;
  }

  bool visit(const State& state, int depth) {
    const Key key = key_of(state);
    switch (seen_.enter(key)) {
      case Seen::Is::kOnPath:
        return false;
      case Seen::Is::kKnown:
        return true;
      default:
        break;
    }
    deepest_ = std::max(deepest_, depth);
    bool stuck = !Group::finished(state, bounds_);
    const bool clean =
        each_move(state, [&](const Move& move, const Effect& effect, const State& next) {
          ++moves_;
          stuck &= !effect.moved || move.give_up;
          if (effect.violation != nullptr) return false;
          if (!effect.moved) return true;
          path_.push_back(move);
          if (!visit(next, depth + 1)) return false;
          path_.pop_back();
          return true;
        });
    seen_.leave(key);
    return clean && !stuck;
  }

  void print(const std::vector<Move>& path, const char* violation) const {
    State state = Group::initial(bounds_);
    for (const Move& move : path) {
      const int operation = state.ranks[move.rank].operation + !state.ranks[move.rank].inside();
      std::string log;
      Group::apply(state, bounds_, move, &log);
      std::printf("  rank %d, operation %d: %s\n", move.rank, operation, log.c_str());
    }
    std::printf("VIOLATION after %zu moves: %s\n", path.size(), violation);
  }

  const Bounds bounds_;
  Seen seen_;
  std::vector<Move> path_;
  size_t moves_ = 0;
  int deepest_ = 0;
};

template <class Group>
bool run_search(const Bounds& bounds) {
  Search<Group> search(bounds);
  const bool clean = search.visit_all();
  if (clean) {
    search.print_counts();
  } else {
    search.print_shortest();
  }
  return clean;
}

using Explore = bool (*)(const Bounds& bounds);

// What an explorer can run: with all rules, and with each left out.
struct Explorers {
  Explore two_ranks = nullptr;
  Explore three_ranks = nullptr;
  std::map<std::string, Explore> without;
  int world_without = 2;  // the ranks that are enough to miss each rule
};

// An explorer's command line: `rules`, or the ranks, the `bounds` named, and maybe a rule to leave
// out. 1 where there is a violation, 2 for a bad command line.
inline int explore(int argc, char** argv, const std::vector<int Bounds::*>& bounds_named,
                   const Explorers& explorers) {
  if (argc == 2 && std::strcmp(argv[1], "rules") == 0) {
    for (const auto& [rule, run] : explorers.without) std::puts(rule.c_str());
    return 0;
  }
  const int numbers = 1 + static_cast<int>(bounds_named.size());
  if (argc != 1 + numbers && argc != 2 + numbers) {
    std::fprintf(stderr, "%s: %d numbers, and maybe a rule to leave out\n", argv[0], numbers);
    return 2;
  }
  const int world = std::atoi(argv[1]);
  Bounds bounds;
  for (int i = 1; i < numbers; ++i) bounds.*bounds_named[i - 1] = std::atoi(argv[1 + i]);
  Explore run = nullptr;
  if (argc == 2 + numbers) {
    const auto without = explorers.without.find(argv[1 + numbers]);
    const bool known = world == explorers.world_without && without != explorers.without.end();
    if (known) run = without->second;
  } else if (world == 2 || world == 3) {
    run = world == 2 ? explorers.two_ranks : explorers.three_ranks;
  }
  if (run == nullptr || bounds.operations > kMostOperations || bounds.ring > kMostSlots) {
    std::fprintf(stderr, "out of range\n");
    return 2;
  }
  return run(bounds) ? 0 : 1;
}

}  // namespace explore
