// What a lane tells of its calls: counts by route, the flight record, and the error that
// PG_SDMA_STRICT asks for in place of a call that would not go direct.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "backend/collectives/collective.h"
#include "backend/group.h"
#include "backend/log/flight_record.h"
#include "backend/log/flight_recorder.h"
#include "backend/log/stats.h"
#include "transport/operation.h"

namespace pg_sdma {

class CallLog {
 public:
  // `inner`: the inner backend's name.
  CallLog(std::shared_ptr<const Group> group, std::string inner);

  // -- operations that are always the inner's. `add` returns their entry's id, 0 for none.
  bool records() const { return recorder_.on(); }
  uint64_t add(const FlightRecorder::Made& made) { return recorder_.add(made); }
  void not_ours(uint64_t record) { recorder_.route(record, 0, not_ours_); }
  void issued(uint64_t record) { recorder_.end(record, FlightRecorder::State::kIssued); }

  // -- operations that may go direct
  void add(Collective& collective);
  void start(const Collective& collective, const std::function<uintptr_t()>& stream);
  // It is being agreed on, as operation `number`.
  void undecided(const Collective& collective, uint64_t number);
  void decided(const Collective& collective, const Call& part, const Operation& operation);
  // The inner is to have all of it, for `reason`.
  void refused(const Collective& collective, const std::string& reason);
  void count_inner(const Collective& collective, const std::string& reason);
  void end(const Collective& collective, FlightRecorder::State state) {
    recorder_.end(collective.record, state);
  }
  // Raises where PG_SDMA_STRICT forbids the inner.
  void raise_if_strict(const Collective& collective, const std::string& reason) const;

  // Writes the flight records of this process, once.
  void write_fault(const std::string& why);
  void fill(LaneRecord& record) const;
  std::vector<Stats::Row> stats() const { return stats_.rows(); }

 private:
  const std::shared_ptr<const Group> group_;
  const std::string inner_;
  Stats stats_;
  FlightRecorder recorder_;
  const std::string* const direct_;    // the empty reason
  const std::string* const deferred_;  // of direct ones for which ranks were late
  const std::string* const not_ours_;  // why other collectives are the inner's
  std::atomic<bool> fault_written_{false};
};

}  // namespace pg_sdma
