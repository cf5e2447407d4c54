#include "backend/log/call_log.h"

#include <cstdio>
#include <utility>

#include "backend/log/call_sizes.h"

namespace pg_sdma {

CallLog::CallLog(std::shared_ptr<const Group> group, std::string inner)
    : group_(std::move(group)),
      inner_(std::move(inner)),
      recorder_(group_->settings.trace_entries),
      direct_(recorder_.keep("")),
      deferred_(recorder_.keep(FlightRecorder::kInOrderOfArrival)),
      not_ours_(recorder_.keep("not an operation that goes direct")) {}

void CallLog::add(Collective& collective) {
  if (!recorder_.on()) return;
  FlightRecorder::Made made{collective.name()};
  CallSizes::fill(made, collective.outputs(), collective.inputs());
  made.async = collective.async;
  made.timeout_ms = collective.call.timeout.count();
  collective.record = recorder_.add(made);
}

void CallLog::start(const Collective& collective, const std::function<uintptr_t()>& stream) {
  if (recorder_.on()) recorder_.start(collective.record, stream());
}

void CallLog::undecided(const Collective& collective, uint64_t number) {
  recorder_.route(collective.record, number, nullptr);
}

void CallLog::decided(const Collective& collective, const Call& part, const Operation& operation) {
  const Decision& decision = operation.decision;
  stats_.count(part.operation, decision.reason, part.total_bytes());
  if (!recorder_.on()) return;
  const std::string* why = !decision.direct                  ? recorder_.keep(decision.reason)
                           : operation.in_order_of_arrival() ? deferred_
                                                             : direct_;
  recorder_.route(collective.record, operation.number, why);
}

void CallLog::refused(const Collective& collective, const std::string& reason) {
  if (recorder_.on()) recorder_.route(collective.record, 0, recorder_.keep(reason));
  // Unless it comes to be issued.
  recorder_.end(collective.record, FlightRecorder::State::kFailed);
}

void CallLog::count_inner(const Collective& collective, const std::string& reason) {
  stats_.count(collective.call.operation, reason, collective.facts.total_bytes);
}

void CallLog::raise_if_strict(const Collective& collective, const std::string& reason) const {
  TORCH_CHECK(!group_->settings.strict, "rank ", group_->rank,
              ": PG_SDMA_STRICT=1: ", collective.call.operation, " of group ", group_->name,
              " would use the inner backend ", inner_, ": ", reason, " (",
              collective.facts.total_bytes, " bytes in ", collective.facts.tensors,
              collective.facts.tensors == 1 ? " tensor)" : " tensors)",
              "; remove what keeps it from going direct, or unset PG_SDMA_STRICT");
}

void CallLog::write_fault(const std::string& why) {
  if (group_->settings.trace_file.empty() || fault_written_.exchange(true)) return;
  const auto own = static_cast<size_t>(group_->rank);
  const auto& ranks = group_->global_ranks;
  const std::string failed = flight_record::write(
      group_->settings.trace_file, own < ranks.size() ? ranks[own] : group_->rank, why);
  if (!failed.empty()) std::fprintf(stderr, "pg_sdma: no flight record: %s\n", failed.c_str());
}

void CallLog::fill(LaneRecord& record) const {
  record.group = group_->name;
  record.inner = inner_;
  record.rank = group_->rank;
  record.global_ranks = group_->global_ranks;
  record.capacity = recorder_.capacity();
  record.recorded = recorder_.recorded();
  record.entries = recorder_.entries();
}

}  // namespace pg_sdma
