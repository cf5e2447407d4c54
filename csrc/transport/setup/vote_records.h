// What the ranks of a group tell one another in a vote, as text on its board, and what follows from
// all of their records alike on every rank.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace pg_sdma {

// A record: one `name=value` a line. Values hold no line breaks.
using Fields = std::map<std::string, std::string>;
std::string write_fields(const Fields& fields);
Fields read_fields(const std::string& text);
std::string one_line(std::string text);
// Several texts as one.
std::string write_list(const std::vector<std::string>& texts);
std::vector<std::string> read_list(const std::string& text);

// Ranks that share this can name each other's processes and read their descriptors.
std::string host_identity();

// Why the records of a group rule a transport out; nothing when they do not.
std::optional<std::string> objection(const std::vector<std::string>& records);
// How it begins where settings are the reason.
constexpr const char* kSettingsDiffer = "settings differ: ";
// Why some rank cannot sum; empty when all can.
std::string no_sums(const std::vector<std::string>& records);
bool all_have_offers(const std::vector<std::string>& records);
bool off_everywhere(const std::vector<std::string>& records);

// What a rank's "no" is about, the likeliest cause first: a call was refused there, or a test found
// something, perhaps because a peer's call was refused, or it has only heard of another's trouble.
constexpr const char* kRefused = "";
constexpr const char* kFound = "found";
constexpr const char* kHeard = "heard";

// Why a step of the vote failed; nothing when every rank said yes.
std::optional<std::string> first_no(const std::vector<std::string>& answers);

}  // namespace pg_sdma
