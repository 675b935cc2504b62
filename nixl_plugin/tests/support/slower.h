// SPDX-License-Identifier: Apache-2.0
//
// How much longer than otherwise tests wait for what has to happen, where a sanitizer makes everything slower.
#ifndef KVBM_CXL_NIXL_TESTS_SLOWER_H
#define KVBM_CXL_NIXL_TESTS_SLOWER_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int SLOWER = 5;
#else
constexpr int SLOWER = 1;
#endif

#endif
