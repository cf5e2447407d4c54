// What a group says of operations that fail.
#pragma once

#include <string>
#include <vector>

#include "transport/membership.h"
#include "transport/memory/control_page.h"
#include "transport/operation.h"

namespace pg_sdma::messages {

// An operation, as the beginning of a message.
std::string title(const Membership& self, const Operation& operation);

// The calls of operation `number`, whose records are in the page's ring, do not fit together.
std::string mismatch(const Membership& self, const ControlPage& page, uint64_t number,
                     uint64_t ring);

// The same where the own call breaks the group, whose other ranks count on it. `culprit`: whose
// call, `records[culprit]`, the own contradicts; the own rank where that is invalid by itself.
std::string late_mismatch(const Membership& self, uint64_t number, const CallRecord& own,
                          int culprit, const std::vector<CallRecord>& records);

}  // namespace pg_sdma::messages
