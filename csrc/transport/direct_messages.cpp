// What DirectTransport says of operations that fail.
#include <sstream>
#include <string>

#include "transport/direct_transport.h"

namespace pg_sdma {
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

}  // namespace

std::string DirectTransport::explain_error() const {
  const uint64_t slot = number_ % options_.ring;
  std::ostringstream text;
  text << "rank " << options_.rank << ": operation " << number_ << " of group " << options_.group
       << ": the ranks' calls do not fit together. ";
  int bad = 0;
  for (int rank = 0; rank < options_.world; ++rank) {
    if (page_.record_number(rank, slot) != number_) continue;
    CallRecord record;
    page_.copy_record(rank, slot, record);
    if (record.summary.state == CallState::kInvalid) ++bad;
    text << told(rank, record) << ". ";
  }
  text << "No rank has started; ";
  // Where no rank's arguments are good, the calls may well be the same.
  text << (bad == options_.world ? "correct the arguments on every rank."
                                 : "make the same call with the same sizes, dtype and reduction on "
                                   "every rank.");
  return text.str();
}

std::string DirectTransport::explain_late_error(int culprit) const {
  std::ostringstream text;
  text << "rank " << options_.rank << ": operation " << number_ << " of group " << options_.group
       << ": the ranks' calls do not fit together. " << told(options_.rank, own_) << ". ";
  if (culprit != options_.rank) text << told(culprit, records_[culprit]) << ". ";
  if (culprit == options_.rank && own_.summary.state != CallState::kInvalid) {
    text << "The others' is an all-gather into one tensor a call or several. ";
  }
  text << "This rank was late and others had started, so the group is broken; make the same call "
          "with the same sizes, dtype and reduction on every rank.";
  return text.str();
}

int DirectTransport::furthest_behind(int rank) const {
  // Who waits for a peer's slot has filled more of its own.
  for (int peer = 0; peer < options_.world; ++peer) {
    if (page_.done(peer) < number_ && page_.filled(peer) < page_.filled(rank)) rank = peer;
  }
  return rank;
}

std::string DirectTransport::who_is_missing(const Call& call, int rank, const char* what) const {
  std::ostringstream text;
  text << this_operation() << " timed out after " << call.timeout.count() << " ms: rank " << rank
       << " " << what << ". "
       << tell_progress(progress(), number_, engine_->stream_ordered(), Clock::now() - started_)
       << " Look for that rank's error, or raise the group's timeout.";
  return text.str();
}

std::string DirectTransport::this_operation() const {
  return "rank " + std::to_string(options_.rank) + ": " + own_.operation + " (operation " +
         std::to_string(number_) + " of group " + options_.group + ", " +
         std::to_string(own_.total_bytes) +
         (own_.reduction[0] != 0 ? " bytes of input)" : " bytes of output)");
}

}  // namespace pg_sdma
