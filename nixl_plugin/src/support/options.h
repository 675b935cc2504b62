// SPDX-License-Identifier: Apache-2.0
//
// What can be set. Each option has one row in the table of options.cpp; its value is the parameter that the application gave to
// createBackend, or the default.
#pragma once

#include "status.h"

namespace kvbm_cxl {

struct Options {
    std::string pool;                 // devices of the pool; empty = CXL_POOL of the environment
    uint64_t timeout_ms = 0;          // longest wait for a peer
    uint64_t inline_bytes = 0;        // transfers up to this size end inside postXfer
    uint64_t worker_threads = 0;      // threads that copy larger ones
    uint64_t spin_us = 0;             // how long the progress thread polls after the last activity before it sleeps
    uint64_t staging_bytes = 0;       // pool memory for staged transfers, at most, per engine
    uint64_t staging_chunk_bytes = 0; // of it per step of a pipeline
    std::string name_space;           // of objects whose key does not name one
    uint64_t object_checksums = 0;    // 1 = sums of objects are compared
    std::string file_access;          // how files are reached: auto, mmap or pread
    std::string cuda_library;         // the CUDA driver; "none" = GPU memory is not offered
};

/// Reads the options. A value that cannot be meant is an error that names it; an unknown name is only logged, since programs pass
/// the parameters of other backends along.
Status read_options(const nixl_b_params_t& given, Options& options);

/// What an application that asks for the backend's options gets: every option with the value that it has without parameters.
nixl_b_params_t default_options();

/// A row of the table, for documents and tests.
struct OptionRow {
    const char* name;
    const char* fallback;
    const char* meaning;
};
std::vector<OptionRow> option_rows();

/// A number of bytes with an optional K, M or G (powers of 1024); false if it is none.
bool parse_size(std::string_view text, uint64_t& bytes);

} // namespace kvbm_cxl
