#include "transport/health/messages.h"

#include <sstream>

namespace pg_sdma::messages {
namespace {

std::string told(int rank, const CallRecord& record) {
  if (record.summary.state == CallState::kInvalid) {
    return std::string("Bad arguments on ") + record.why;  // which begins with the rank
  }
  std::ostringstream text;
  const bool reduces = record.reduction[0] != 0;
  text << "Rank " << rank << ": " << record.operation;
  if (reduces) text << " (" << record.reduction << ")";
  text << " of " << record.call_tensors << " " << record.dtype
       << (record.call_tensors == 1 ? " tensor" : " tensors") << ", " << record.total_bytes
       << (reduces ? " bytes of input" : " bytes of output");
  return text.str();
}

std::string no_fit(const Membership& self, uint64_t number) {
  return "rank " + std::to_string(self.rank) + ": operation " + std::to_string(number) +
         " of group " + self.group + ": the ranks' calls do not fit together. ";
}

}  // namespace

std::string title(const Membership& self, const Operation& operation) {
  return "rank " + std::to_string(self.rank) + ": " + operation.name + " (operation " +
         std::to_string(operation.number) + " of group " + self.group + ", " +
         std::to_string(operation.bytes) +
         (operation.reduces ? " bytes of input)" : " bytes of output)");
}

std::string mismatch(const Membership& self, const ControlPage& page, uint64_t number,
                     uint64_t ring) {
  const uint64_t slot = number % ring;
  std::ostringstream text;
  text << no_fit(self, number);
  int bad = 0;
  for (int rank = 0; rank < self.world; ++rank) {
    if (page.record_number(rank, slot) != number) continue;
    CallRecord record;
    page.copy_record(rank, slot, record);
    if (record.summary.state == CallState::kInvalid) ++bad;
    text << told(rank, record) << ". ";
  }
  text << "No rank has started; ";
  // Where no rank's arguments are good, the calls may well be the same.
  text << (bad == self.world ? "correct the arguments on every rank."
                             : "make the same call with the same sizes, dtype and reduction on "
                               "every rank.");
  return text.str();
}

std::string late_mismatch(const Membership& self, uint64_t number, const CallRecord& own,
                          int culprit, const std::vector<CallRecord>& records) {
  std::ostringstream text;
  text << no_fit(self, number) << told(self.rank, own) << ". ";
  if (culprit != self.rank) text << told(culprit, records[culprit]) << ". ";
  if (culprit == self.rank && own.summary.state != CallState::kInvalid) {
    text << "The others' is an all-gather into one tensor a call or several. ";
  }
  text << "This rank was late and others had started, so the group is broken; make the same call "
          "with the same sizes, dtype and reduction on every rank.";
  return text.str();
}

}  // namespace pg_sdma::messages
