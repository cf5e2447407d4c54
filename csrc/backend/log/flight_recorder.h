// What a lane remembers of its last collectives, for who asks after a hang.
//
// One writer at a time adds entries (under the lane's mutex); whoever carries an operation out
// updates its entry. Every field is a relaxed atomic, so that a dump from any thread needs no lock:
// it leaves out entries that change under its eyes. An entry that was overwritten is updated no
// more, unless that happens in the very nanoseconds of the update.
#pragma once

#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace pg_sdma {

class FlightRecorder {
 public:
  enum class State : int { kScheduled, kStarted, kIssued, kEnqueued, kCompleted, kFailed };

  // What is known of a call when it is made. `operation` lives for ever.
  struct Made {
    const char* operation = "";
    uint64_t input_elements = 0;
    uint64_t output_elements = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    uint32_t tensors = 0;
    bool async = false;
    int64_t timeout_ms = 0;
  };

  // One collective. Times are of the system's clock, in nanoseconds; 0: not yet.
  struct Entry {
    uint64_t id = 0;  // 1, 2, 3, ... of this lane, equal on all ranks that make equal calls
    Made made;
    State state = State::kScheduled;
    uint64_t number = 0;  // its last number on the direct route, 0 if it never took one
    std::string route;    // "direct", "inner", or empty while undecided
    std::string reason;   // why the inner; kInOrderOfArrival; or empty
    uintptr_t stream = 0;
    int64_t created_ns = 0;
    int64_t started_ns = 0;
    int64_t decided_ns = 0;  // its (last part's) route
    int64_t issued_ns = 0;   // enqueued, handed to the inner, carried or failed
    int64_t ended_ns = 0;
  };

  // `entries`: how many are kept; 0 records nothing.
  explicit FlightRecorder(size_t entries);

  bool on() const { return !slots_.empty(); }
  // Returns the new entry's id; 0 where nothing is recorded, which the calls below ignore.
  uint64_t add(const Made& made);
  void start(uint64_t id, uintptr_t stream);
  // The reason of a direct operation for which ranks were late.
  static constexpr const char* kInOrderOfArrival = "in order of arrival";

  // The route of (the last part of) an operation. `reason` comes from keep(); the direct route has
  // an empty one, or kInOrderOfArrival.
  void route(uint64_t id, uint64_t number, const std::string* reason);
  // Keeps a reason for as long as the recorder: there are few. From any thread.
  const std::string* keep(const std::string& reason);
  // kIssued: handed to the inner; kEnqueued: direct, on a stream; kCompleted, kFailed: over.
  void end(uint64_t id, State state);

  size_t capacity() const { return slots_.size(); }
  uint64_t recorded() const { return last_.load(); }
  std::vector<Entry> entries() const;  // oldest first

 private:
  struct Slot {
    std::atomic<uint64_t> id{0};
    std::atomic<const char*> operation{""};
    std::atomic<uint64_t> input_elements{0};
    std::atomic<uint64_t> output_elements{0};
    std::atomic<int> dtype{0};
    std::atomic<uint32_t> tensors{0};
    std::atomic<bool> async{false};
    std::atomic<int64_t> timeout_ms{0};
    std::atomic<State> state{State::kScheduled};
    std::atomic<uint64_t> number{0};
    std::atomic<const std::string*> reason{nullptr};  // null: undecided
    std::atomic<uintptr_t> stream{0};
    std::atomic<int64_t> created_ns{0};
    std::atomic<int64_t> started_ns{0};
    std::atomic<int64_t> decided_ns{0};
    std::atomic<int64_t> issued_ns{0};
    std::atomic<int64_t> ended_ns{0};
  };

  Slot* find(uint64_t id);
  static bool read(const Slot& slot, Entry& into);

  std::vector<Slot> slots_;
  std::atomic<uint64_t> last_{0};
  std::mutex reasons_mutex_;
  std::set<std::string> reasons_;
};

const char* name_of(FlightRecorder::State state);

}  // namespace pg_sdma
