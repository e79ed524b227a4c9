# What is installed for C: the library, its headers, a CMake package and a pkg-config file.
#
# A wheel has no links, and is no prefix of its own: all of it lies in the folder of the package,
# and the library under its soname only, which is what a program that is linked to it looks for.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

if(SKBUILD)
  set(UNIMEM_PREFIX unimem/)
  set(UNIMEM_LIBDIR lib)
  set(UNIMEM_INCLUDEDIR include)
  set(UNIMEM_LINK -l:libunimem.so.${UNIMEM_SOVERSION})
  set_target_properties(unimem PROPERTIES SUFFIX .so.${UNIMEM_SOVERSION})
else()
  set(UNIMEM_PREFIX "")
  set(UNIMEM_LIBDIR ${CMAKE_INSTALL_LIBDIR})
  set(UNIMEM_INCLUDEDIR ${CMAKE_INSTALL_INCLUDEDIR})
  set(UNIMEM_LINK -lunimem)
  set_target_properties(unimem PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${UNIMEM_SOVERSION})
endif()
set(UNIMEM_CMAKEDIR ${UNIMEM_LIBDIR}/cmake/unimem)
set(UNIMEM_PKGCONFIGDIR ${UNIMEM_LIBDIR}/pkgconfig)

# Nothing but public functions is exported, and a program notes which interface it was built for.
configure_file(cmake/unimem.map.in unimem.map @ONLY)
target_link_options(unimem PRIVATE -Wl,--version-script=${CMAKE_CURRENT_BINARY_DIR}/unimem.map)
set_property(TARGET unimem APPEND PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_BINARY_DIR}/unimem.map)

set(UNIMEM_LIBRARIES unimem)
set(UNIMEM_COMPONENTS shared)
if(NOT SKBUILD)
  add_library(unimem_static STATIC $<TARGET_OBJECTS:unimem_objects>)
  set_target_properties(unimem_static PROPERTIES OUTPUT_NAME unimem EXPORT_NAME static)
  target_link_libraries(unimem_static PRIVATE Threads::Threads m)
  list(APPEND UNIMEM_LIBRARIES unimem_static)
  list(APPEND UNIMEM_COMPONENTS static)
endif()
foreach(library component IN ZIP_LISTS UNIMEM_LIBRARIES UNIMEM_COMPONENTS)
  target_include_directories(${library} INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/native/include>)

  install(TARGETS ${library} EXPORT unimem-${component}
    LIBRARY DESTINATION ${UNIMEM_PREFIX}${UNIMEM_LIBDIR}
      COMPONENT unimem_runtime NAMELINK_COMPONENT unimem_development
    ARCHIVE DESTINATION ${UNIMEM_PREFIX}${UNIMEM_LIBDIR} COMPONENT unimem_development
    INCLUDES DESTINATION ${UNIMEM_PREFIX}${UNIMEM_INCLUDEDIR})
  install(EXPORT unimem-${component} NAMESPACE unimem::
    DESTINATION ${UNIMEM_PREFIX}${UNIMEM_CMAKEDIR} COMPONENT unimem_development)
endforeach()
file(GLOB UNIMEM_HEADERS native/include/*.h)
install(FILES ${UNIMEM_HEADERS} DESTINATION ${UNIMEM_PREFIX}${UNIMEM_INCLUDEDIR}
  COMPONENT unimem_development)

configure_file(cmake/unimem-config.cmake.in unimem-config.cmake @ONLY)
# Before version 1, a minor version may break what was there.
write_basic_package_version_file(unimem-config-version.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/unimem-config.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/unimem-config-version.cmake
  DESTINATION ${UNIMEM_PREFIX}${UNIMEM_CMAKEDIR} COMPONENT unimem_development)

# Both files work wherever the folder is moved to.
file(RELATIVE_PATH UNIMEM_UP /${UNIMEM_PKGCONFIGDIR} /)
string(REGEX REPLACE "/$" "" UNIMEM_UP "${UNIMEM_UP}")
configure_file(cmake/unimem.pc.in unimem.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/unimem.pc
  DESTINATION ${UNIMEM_PREFIX}${UNIMEM_PKGCONFIGDIR} COMPONENT unimem_development)
